-- Time since which the engine of a ticket is idle, by the reports of its EM. Only the catalogue changes, so the lock is short.
ALTER TABLE linkis_user_resource_meta_data ADD COLUMN idle_since timestamptz;
