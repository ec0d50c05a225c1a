"""Families: functions from sizes to a `Decoder`, and what Hugging Face calls their keys and arrays; one file each."""
