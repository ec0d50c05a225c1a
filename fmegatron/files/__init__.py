"""What all rooms ask a file system: queries, owners of files, and atomic writes."""
