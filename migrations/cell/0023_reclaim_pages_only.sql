-- The indexes of the migration before replace these. Reads of tickets wait for the transaction of an index that goes, and not for a scan.
DROP INDEX linkis_user_resource_idle_longest, linkis_user_resource_idle_user, linkis_user_resource_idle_since;
