"""Reports: one HTML page about runs, made of their records, events and configurations, without any network."""
