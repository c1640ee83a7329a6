package io.linkisrm.linkis;

import java.util.Map;
import org.apache.linkis.manager.am.conf.AMConfiguration;
import org.apache.linkis.manager.common.entity.resource.NodeResource;
import org.apache.linkis.manager.common.entity.resource.ResourceType;
import org.apache.linkis.manager.common.protocol.engine.EngineCreateRequest;
import org.apache.linkis.manager.label.utils.LabelUtil;
import org.apache.linkis.manager.rm.domain.RMLabelContainer;
import org.apache.linkis.manager.rm.external.service.ExternalResourceService;
import org.apache.linkis.manager.rm.external.yarn.YarnResourceIdentifier;
import org.apache.linkis.manager.rm.utils.AcrossClusterRulesJudgeUtils;

/** Linkis's rules for tasks that may run in one of two clusters. They are checked before the service is called, as in Linkis. */
final class AcrossCluster {
    private AcrossCluster() {}

    /** Throws Linkis's exception if the rules send the task to the other cluster. Reads YARN for no other purpose. */
    static void check(RMLabelContainer labels, NodeResource resource, EngineCreateRequest request, ExternalResourceService external) {
        Map<String, String> properties = request == null ? null : request.getProperties();
        if (properties == null || !Boolean.parseBoolean(properties.get(AMConfiguration.ACROSS_CLUSTER_TASK))) {
            return;
        }
        String queue;
        if (resource.getResourceType() == ResourceType.DriverAndYarn) {
            queue = Amounts.place(resource.getMaxResource());
        } else {
            String engineType = LabelUtil.getEngineType(labels.getLabels());
            if (engineType == null || "spark".equals(engineType) || !AMConfiguration.SUPPORT_CLUSTER_RULE_EC_TYPES.contains(engineType)) {
                return;
            }
            queue = properties.getOrDefault(AMConfiguration.YARN_QUEUE_NAME_CONFIG_KEY, "default");
        }
        NodeResource provided = external.getResource(ResourceType.Yarn, labels, new YarnResourceIdentifier(queue));
        AcrossClusterRulesJudgeUtils.originClusterResourceCheck(request, provided.getMaxResource(), provided.getUsedResource());
        AcrossClusterRulesJudgeUtils.targetClusterResourceCheck(
                labels, request, provided.getMaxResource(), provided.getUsedResource(), external);
    }
}
