-- That every ticket was granted.
INSERT INTO linkis_resource_action_record (action, ticket_id, "user", creator, engine_type, labels, em_application_name,
    em_instance, resource_type, resource, actor, action_time)
SELECT 'granted', ticket_id, "user", creator, engine_type, labels, em_application_name, em_instance, resource_type,
    coalesce(user_locked_resource, user_used_resource), principal, locked_time
FROM linkis_user_resource_meta_data;
