"""The trainer: reads shards, trains, saves, resumes exactly, scores. Never imports fleetd."""
