-- Tables of home: data for all cells. No statement and no foreign key leads from here into the tables of a cell.
--
-- Amounts are JSON documents in Linkis's form. Keys compare by bytes (collation "C"). All times are the database's.

-- One row is one limit: a rule.
CREATE TABLE linkis_resource_limit (
    -- Labels as a JSON object: a value, or null for each value separately.
    pattern jsonb NOT NULL,
    -- The pattern for display and metrics: "user=hadoop,each creator".
    name text COLLATE "C" NOT NULL,
    -- Label names as a JSON array, in order.
    label_set jsonb NOT NULL,
    -- Maximum by dimension, as a JSON object.
    max_resource jsonb NOT NULL,
    update_time timestamptz NOT NULL,
    -- Principal of the last change.
    updated_by text COLLATE "C" NOT NULL,
    -- SHA-256 of the pattern, which may be longer than an index entry.
    pattern_hash bytea NOT NULL,
    -- enforced refuses larger amounts; advisory grants and counts them; off only counts the use.
    mode text NOT NULL DEFAULT 'enforced',
    CONSTRAINT linkis_resource_limit_key PRIMARY KEY (pattern_hash),
    CONSTRAINT linkis_resource_limit_hash CHECK (octet_length(pattern_hash) = 32),
    CONSTRAINT linkis_resource_limit_mode CHECK (mode IN ('enforced', 'advisory', 'off')),
    CONSTRAINT linkis_resource_limit_not_negative CHECK (NOT jsonb_path_exists(max_resource, '$.* ? (@ < 0)'))
);
-- Label sets with limits, without a read of the limits. By a hash, because label names may be longer than an index entry.
CREATE INDEX linkis_resource_limit_label_set ON linkis_resource_limit (md5(label_set::text));

-- One row is one rule that a change of the limits modified, so that an instance reads only the changed rules. Each change has at
-- least one row, and only the last rows are kept. A gap in the chain of versions makes an instance read all rules.
CREATE TABLE linkis_resource_limit_change (
    number bigint GENERATED ALWAYS AS IDENTITY,
    -- Limits version before and after the change.
    before uuid NOT NULL,
    version uuid NOT NULL,
    -- The rule and its new maximum; a null maximum means that the rule was deleted. A null pattern means a change outside of the rules.
    pattern jsonb,
    max_resource jsonb,
    -- Whether the change modified more than its rows list.
    is_whole boolean NOT NULL,
    -- The new mode; null if the rule was deleted.
    mode text,
    CONSTRAINT linkis_resource_limit_change_key PRIMARY KEY (number),
    CONSTRAINT linkis_resource_limit_change_rule CHECK (max_resource IS NULL OR pattern IS NOT NULL)
);
CREATE INDEX linkis_resource_limit_change_version ON linkis_resource_limit_change (version, number);

-- One row is one token. A name may have several tokens, so that one can replace another. A revoked or expired token keeps its row
-- for some time, so that its holder gets the reason. While the table has a row, every call needs a credential.
CREATE TABLE linkis_rm_token (
    -- Identifies the token where the token must not be shown.
    token_id uuid NOT NULL,
    -- SHA-256 of the token. The token itself is not stored.
    token_hash bytea NOT NULL,
    -- Principal of the calls with the token: the actor in the history.
    name text COLLATE "C" NOT NULL,
    roles text[] NOT NULL,
    -- EMs of the role ecm: "application/host", with "*" for any.
    ems text[] NOT NULL,
    -- Users of the roles manager and viewer; null for all users.
    users text[],
    -- Contact person.
    owner text COLLATE "C" NOT NULL,
    create_time timestamptz NOT NULL,
    created_by text COLLATE "C" NOT NULL,
    expire_time timestamptz NOT NULL,
    revoke_time timestamptz,
    revoked_by text COLLATE "C",
    -- Time of the last use, up to a minute old.
    last_used_time timestamptz,
    CONSTRAINT linkis_rm_token_key PRIMARY KEY (token_id),
    CONSTRAINT linkis_rm_token_hash_key UNIQUE (token_hash),
    CONSTRAINT linkis_rm_token_hash CHECK (octet_length(token_hash) = 32),
    CONSTRAINT linkis_rm_token_reserved CHECK (name NOT IN ('', 'anonymous', 'linkis-rm')),
    CONSTRAINT linkis_rm_token_roles CHECK (
        cardinality(roles) > 0 AND roles <@ ARRAY['ecm', 'manager', 'viewer', 'operator', 'admin']),
    -- The role ecm requires EMs.
    CONSTRAINT linkis_rm_token_ems CHECK (NOT 'ecm' = ANY (roles) OR cardinality(ems) > 0),
    CONSTRAINT linkis_rm_token_revoked CHECK ((revoke_time IS NULL) = (revoked_by IS NULL))
);
CREATE INDEX linkis_rm_token_name ON linkis_rm_token (name);

-- One row: a number that each change of the tokens increments, so that instances find changes without a read of the tokens.
CREATE TABLE linkis_rm_token_version (
    only_row boolean NOT NULL DEFAULT true,
    version bigint NOT NULL,
    CONSTRAINT linkis_rm_token_version_key PRIMARY KEY (only_row),
    CONSTRAINT linkis_rm_token_version_one CHECK (only_row)
);
INSERT INTO linkis_rm_token_version (version) VALUES (1);

-- One row is one provider: an external cluster whose queues limit requests.
CREATE TABLE linkis_external_resource_provider (
    -- Name of the type in Linkis: "Yarn".
    resource_type text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    -- Labels of the requests that the provider serves, as a JSON object; empty for the provider of all other requests.
    labels jsonb NOT NULL,
    -- Connection settings as JSON with Linkis's keys, including the password.
    config text NOT NULL,
    -- Changes with each write.
    etag uuid NOT NULL,
    update_time timestamptz NOT NULL,
    -- Principal of the last change.
    updated_by text COLLATE "C" NOT NULL,
    -- SHA-256 of the labels, which may be longer than an index entry.
    labels_hash bytea NOT NULL,
    CONSTRAINT linkis_external_resource_provider_key PRIMARY KEY (resource_type, name),
    CONSTRAINT linkis_external_resource_provider_labels UNIQUE (resource_type, labels_hash),
    CONSTRAINT linkis_external_resource_provider_hash CHECK (octet_length(labels_hash) = 32)
);
