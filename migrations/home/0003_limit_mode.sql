-- Of home: what a rule does where it decides.

-- enforced: refuses what goes beyond it; advisory: lets it through, and tells of it; off: lets it through, so that its label set is
-- counted, and no more. What an earlier release has set is enforced; where there are modes, it may only read (oldest_writer).
ALTER TABLE linkis_resource_limit ADD COLUMN mode text NOT NULL DEFAULT 'enforced';
ALTER TABLE linkis_resource_limit ADD CONSTRAINT linkis_resource_limit_mode CHECK (mode IN ('enforced', 'advisory', 'off'));

-- That of the rule that a change has left; none where it has gone.
ALTER TABLE linkis_resource_limit_change ADD COLUMN mode text;
