-- Of a cell: which EMs are unhealthy, without reading all reports. Locks writes to the reports while it is built: milliseconds for 10,000 EMs.
--
-- A report changes its row in place (HOT) as long as the health stays the same, so the index costs only what changes it. Earlier releases
-- write it without knowing it.
CREATE INDEX linkis_em_report_unhealthy ON linkis_em_report (em_application_name, em_instance) WHERE health = 'unhealthy';
