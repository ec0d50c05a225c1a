"""What every public call begins with: its arguments checked, and the other ranks."""
