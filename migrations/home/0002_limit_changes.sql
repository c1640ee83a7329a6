-- Of home: what each change of the rules has changed, so that whoever knows them as they were need not read them all.

-- At least one row per change, whatever it changed; only the last ones are kept. A change that is told by no row, such as one by an
-- earlier release, breaks the chain: then all rules are read.
CREATE TABLE linkis_resource_limit_change (
    number bigint GENERATED ALWAYS AS IDENTITY,
    -- The version of the limits before, and the one that it led to.
    before uuid NOT NULL,
    version uuid NOT NULL,
    -- A rule and its maximum; without a maximum it has gone. Without a rule, something else has changed.
    pattern jsonb,
    max_resource jsonb,
    -- Whether more has changed than is told here.
    is_whole boolean NOT NULL,
    CONSTRAINT linkis_resource_limit_change_key PRIMARY KEY (number),
    CONSTRAINT linkis_resource_limit_change_rule CHECK (max_resource IS NULL OR pattern IS NOT NULL)
);
CREATE INDEX linkis_resource_limit_change_version ON linkis_resource_limit_change (version, number);

-- Which label sets have rules, without reading these. By a hash, because names may be longer than an index takes.
CREATE INDEX linkis_resource_limit_label_set ON linkis_resource_limit (md5(label_set::text));
