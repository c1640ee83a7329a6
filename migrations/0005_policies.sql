-- Which checks the requests to a kind of EM go through, by name: "em" always, and those of "creator", "user" and "labels" whose
-- limits its tickets count in. Until now the type of its resources stood here, and all limits applied.
UPDATE linkis_em_meta_data SET resource_request_policy = 'em,creator,user,labels';
