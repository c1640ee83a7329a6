-- Of home: who may call, and what they show to say who they are.

-- One row per token; several may be for one name, so that one can take the place of another. What is revoked or over stays for a
-- while, so that its holder is told why; and as long as there is any row at all, nobody is let in without a token.
CREATE TABLE linkis_rm_token (
    -- Names the token where it must not be shown.
    token_id uuid NOT NULL,
    -- SHA-256 of the token, which is stored nowhere.
    token_hash bytea NOT NULL,
    -- Who shows it: the actor in the history.
    name text COLLATE "C" NOT NULL,
    roles text[] NOT NULL,
    -- As an ecm, for which EMs: "application/host", with "*" for any.
    ems text[] NOT NULL,
    -- As a manager or viewer, for whose tickets; null for everybody's.
    users text[],
    -- Whom to ask about it.
    owner text COLLATE "C" NOT NULL,
    create_time timestamptz NOT NULL,
    created_by text COLLATE "C" NOT NULL,
    expire_time timestamptz NOT NULL,
    revoke_time timestamptz,
    revoked_by text COLLATE "C",
    -- When it was last shown, give or take a minute.
    last_used_time timestamptz,
    CONSTRAINT linkis_rm_token_key PRIMARY KEY (token_id),
    CONSTRAINT linkis_rm_token_hash_key UNIQUE (token_hash),
    CONSTRAINT linkis_rm_token_hash CHECK (octet_length(token_hash) = 32),
    CONSTRAINT linkis_rm_token_reserved CHECK (name NOT IN ('', 'anonymous', 'linkis-rm')),
    CONSTRAINT linkis_rm_token_roles CHECK (
        cardinality(roles) > 0 AND roles <@ ARRAY['ecm', 'manager', 'viewer', 'operator', 'admin']),
    -- An ecm speaks for its own hosts, never for all there are.
    CONSTRAINT linkis_rm_token_ems CHECK (NOT 'ecm' = ANY (roles) OR cardinality(ems) > 0),
    CONSTRAINT linkis_rm_token_revoked CHECK ((revoke_time IS NULL) = (revoked_by IS NULL))
);
CREATE INDEX linkis_rm_token_name ON linkis_rm_token (name);

-- Grows with every change of the tokens: by it, instances see that there is something to read.
CREATE TABLE linkis_rm_token_version (
    only_row boolean NOT NULL DEFAULT true,
    version bigint NOT NULL,
    CONSTRAINT linkis_rm_token_version_key PRIMARY KEY (only_row),
    CONSTRAINT linkis_rm_token_version_one CHECK (only_row)
);
INSERT INTO linkis_rm_token_version (version) VALUES (1);
