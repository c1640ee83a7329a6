-- The scopes of users, of creators, and of pairs of them, keyed as the service does: by the hash of the label set's number and the
-- labels' JSON without spaces.
INSERT INTO linkis_label_resource (label_set_id, scope, used_resource, locked_resource, scope_hash)
SELECT label_set_id, scope::jsonb,
    jsonb_build_object('memory', used << 30, 'cores', used, 'instances', used),
    jsonb_build_object('memory', locked << 30, 'cores', locked, 'instances', locked),
    sha256(convert_to(label_set_id || ':' || scope, 'UTF8'))
FROM (
    SELECT
        CASE WHEN "user" IS NULL THEN format('{"creator":"%s"}', creator)
            WHEN creator IS NULL THEN format('{"user":"%s"}', "user")
            ELSE format('{"creator":"%s","user":"%s"}', creator, "user") END AS scope,
        CASE WHEN "user" IS NULL THEN '["creator"]' WHEN creator IS NULL THEN '["user"]'
            ELSE '["creator", "user"]' END AS label_set,
        count(user_used_resource) AS used, count(user_locked_resource) AS locked
    FROM linkis_user_resource_meta_data
    GROUP BY GROUPING SETS (("user"), (creator), ("user", creator))
) AS sums JOIN linkis_label_set s ON s.label_set = sums.label_set::jsonb AND s.state = 'counted';
