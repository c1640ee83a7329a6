-- A reclaim policy can also end busy engines, for entitled requests.
ALTER TABLE linkis_reclaim_policy ADD COLUMN busy boolean NOT NULL DEFAULT false;
-- Time since the grant after which the ticket of a busy engine can be chosen.
ALTER TABLE linkis_reclaim_policy ADD COLUMN min_life_ms bigint NOT NULL DEFAULT 600000;
ALTER TABLE linkis_reclaim_policy ADD CONSTRAINT linkis_reclaim_policy_min_life CHECK (min_life_ms BETWEEN 1000 AND 86400000);

-- Whether the engine of a chosen ticket ends also while it runs tasks.
ALTER TABLE linkis_reclaim ADD COLUMN busy boolean NOT NULL DEFAULT false;
