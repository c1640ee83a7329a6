-- Of a cell: what is told to those who may know of certain users alone.

-- Nothing of it changes while a counter counts, so that counting costs no more.
CREATE INDEX linkis_label_resource_user ON linkis_label_resource ((scope ->> 'user'), scope_hash) WHERE scope ->> 'user' IS NOT NULL;
