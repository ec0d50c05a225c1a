"""What every public call begins with: validated arguments and the interface to the other ranks."""
