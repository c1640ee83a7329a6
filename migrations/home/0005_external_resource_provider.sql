-- Of home: the clusters whose queues somebody else keeps, and how each is asked.

CREATE TABLE linkis_external_resource_provider (
    -- As Linkis calls it: "Yarn".
    resource_type text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    -- The labels of the requests that it is for, as a JSON object; none for the one that is for all others.
    labels jsonb NOT NULL,
    -- How it is asked, as JSON: Linkis's own keys, the password among them.
    config text NOT NULL,
    -- Another whenever it is written.
    etag uuid NOT NULL,
    update_time timestamptz NOT NULL,
    -- Who wrote it last.
    updated_by text COLLATE "C" NOT NULL,
    -- Labels may be longer than an index takes.
    labels_hash bytea NOT NULL,
    CONSTRAINT linkis_external_resource_provider_key PRIMARY KEY (resource_type, name),
    CONSTRAINT linkis_external_resource_provider_labels UNIQUE (resource_type, labels_hash),
    CONSTRAINT linkis_external_resource_provider_hash CHECK (octet_length(labels_hash) = 32)
);
