"""What a checkpoint is on disk, and the directories and object stores that hold it."""
