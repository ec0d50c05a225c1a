"""Reports: one HTML page about runs, made of their records, events and configurations, without any network."""

from fmegatron.moved import no_name as _no_name

globals()["__getattr__"] = _no_name(__name__)
