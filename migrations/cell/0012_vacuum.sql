-- Of a cell: no vacuum gives the end of these tables back to the file system. For that it locks everybody out, for 20 ms and more, again
-- and again; and what a crowd has left empty is soon filled again.
ALTER TABLE linkis_resource_lock SET (vacuum_truncate = off);
ALTER TABLE linkis_user_resource_meta_data SET (vacuum_truncate = off);
ALTER TABLE linkis_em_resource_meta_data SET (vacuum_truncate = off);
ALTER TABLE linkis_label_resource SET (vacuum_truncate = off);
ALTER TABLE linkis_request_id SET (vacuum_truncate = off);
ALTER TABLE linkis_em_report SET (vacuum_truncate = off);
ALTER TABLE linkis_em_observed SET (vacuum_truncate = off, toast.vacuum_truncate = off);
ALTER TABLE linkis_resource_waiting SET (vacuum_truncate = off);
ALTER TABLE linkis_resource_waiting_entry SET (vacuum_truncate = off);
ALTER TABLE linkis_rm_instance SET (vacuum_truncate = off);
