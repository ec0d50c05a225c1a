"""Families: functions from sizes to a `Decoder`, and what Hugging Face calls their keys and arrays; one file each."""

from fmegatron.moved import no_name as _no_name

globals()["__getattr__"] = _no_name(__name__)
