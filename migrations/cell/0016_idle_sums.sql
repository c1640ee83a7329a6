-- Use by idle engines, in the sums by user. Only the catalogue changes, so the locks are short.
-- `idle` is a part of `used`. It may exceed `used` while an instance of an earlier release writes `used` alone.
ALTER TABLE linkis_user_sum ADD COLUMN idle bigint NOT NULL DEFAULT 0,
    ADD CONSTRAINT linkis_user_sum_idle CHECK (idle >= 0) NOT VALID;
-- Sums of all users by dimension, as in `linkis_user_sum`; empty before the first sums.
ALTER TABLE linkis_user_sum_progress ADD COLUMN idle jsonb NOT NULL DEFAULT '{}';
