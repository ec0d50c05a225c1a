"""What every public call begins with: its arguments checked, the other ranks, and Ctrl-C held back where they agree."""
