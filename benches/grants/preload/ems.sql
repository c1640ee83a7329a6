-- The EMs that have tickets, each as large as the load registers it.
INSERT INTO linkis_em_resource_meta_data (em_application_name, em_instance, resource_type, total_resource,
    protected_resource, used_resource, locked_resource, left_resource, over_committed, labels, epoch, register_time,
    version, counted_to)
SELECT em_application_name, em_instance, 'LoadInstance',
    jsonb_build_object('memory', plenty, 'cores', plenty, 'instances', plenty),
    jsonb_build_object('memory', 0, 'cores', 0, 'instances', 0),
    jsonb_build_object('memory', used << 30, 'cores', used, 'instances', used),
    jsonb_build_object('memory', locked << 30, 'cores', locked, 'instances', locked),
    jsonb_build_object('memory', plenty - (used + locked << 30), 'cores', plenty - used - locked,
        'instances', plenty - used - locked),
    false, '{}', 1, now(), 1, (SELECT coalesce(max(label_set_id), 0) FROM linkis_label_set)
FROM (
    SELECT em_application_name, em_instance, count(user_used_resource) AS used, count(user_locked_resource) AS locked
    FROM linkis_user_resource_meta_data GROUP BY em_application_name, em_instance
) AS sums, (SELECT 4611686018427387903 AS plenty) AS amounts;
