"""fleetd: files here are vocabulary that several processes share; each folder is one process."""
