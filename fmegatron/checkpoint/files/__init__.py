"""What a checkpoint is on disk, and the directories, object stores and databases that hold it."""
