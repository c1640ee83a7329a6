-- Of a cell: how amounts in Yarn queues and Kubernetes namespaces count.

-- summed: all queues together, as all was counted before; apart: only where the labels name the queue, or the namespace. What is summed
-- is counted anew beside it, in steps like every label set that is new, and goes when that is done.
ALTER TABLE linkis_label_set ADD COLUMN queues text NOT NULL DEFAULT 'summed';
ALTER TABLE linkis_label_set ADD CONSTRAINT linkis_label_set_queues CHECK (queues IN ('summed', 'apart'));
