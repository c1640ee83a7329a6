package io.linkisrm.linkis;

import java.util.HashMap;
import java.util.Map;
import linkis.rm.v1.LinkisJson;
import org.apache.linkis.manager.common.entity.resource.CPUResource;
import org.apache.linkis.manager.common.entity.resource.DriverAndKubernetesResource;
import org.apache.linkis.manager.common.entity.resource.DriverAndYarnResource;
import org.apache.linkis.manager.common.entity.resource.InstanceResource;
import org.apache.linkis.manager.common.entity.resource.KubernetesResource;
import org.apache.linkis.manager.common.entity.resource.LoadInstanceResource;
import org.apache.linkis.manager.common.entity.resource.LoadResource;
import org.apache.linkis.manager.common.entity.resource.MemoryResource;
import org.apache.linkis.manager.common.entity.resource.Resource;
import org.apache.linkis.manager.common.entity.resource.ResourceType;
import org.apache.linkis.manager.common.entity.resource.SpecialResource;
import org.apache.linkis.manager.common.entity.resource.YarnResource;
import org.apache.linkis.manager.common.utils.ResourceUtils;

/**
 * Converts resources between Linkis and the service. Linkis counts in int where the service has int64: a larger value becomes the largest
 * int.
 */
final class Amounts {
    private Amounts() {}

    /** The resource as the service accepts it: in Linkis's own JSON. */
    static linkis.rm.v1.Resource told(Resource resource, ResourceType type) {
        LinkisJson json = LinkisJson.newBuilder().setResourceType(type.name()).setDocument(ResourceUtils.serializeResource(resource)).build();
        return linkis.rm.v1.Resource.newBuilder().setJson(json).build();
    }

    /** The resource as Linkis has it; null if no kind is set. */
    static Resource read(linkis.rm.v1.Resource told) {
        switch (told.getKindCase()) {
            case MEMORY:
                return new MemoryResource(told.getMemory().getMemory());
            case CPU:
                return new CPUResource(number(told.getCpu().getCores()));
            case LOAD:
                return new LoadResource(told.getLoad().getMemory(), number(told.getLoad().getCores()));
            case INSTANCE:
                return new InstanceResource(number(told.getInstance().getInstances()));
            case LOAD_INSTANCE:
                return driver(told.getLoadInstance());
            case YARN:
                return yarn(told.getYarn());
            case DRIVER_AND_YARN:
                return new DriverAndYarnResource(driver(told.getDriverAndYarn().getLoadInstance()), yarn(told.getDriverAndYarn().getYarn()));
            case KUBERNETES:
                return kubernetes(told.getKubernetes());
            case DRIVER_AND_KUBERNETES:
                return new DriverAndKubernetesResource(driver(told.getDriverAndKubernetes().getLoadInstance()),
                        kubernetes(told.getDriverAndKubernetes().getKubernetes()));
            case SPECIAL:
                return new SpecialResource(new HashMap<String, Object>(told.getSpecial().getResourcesMap()));
            default:
                return null;
        }
    }

    /** The type of the result of {@link #read}. */
    static ResourceType type(linkis.rm.v1.Resource told) {
        switch (told.getKindCase()) {
            case MEMORY:
                return ResourceType.Memory;
            case CPU:
                return ResourceType.CPU;
            case LOAD:
                return ResourceType.Load;
            case INSTANCE:
                return ResourceType.Instance;
            case YARN:
                return ResourceType.Yarn;
            case DRIVER_AND_YARN:
                return ResourceType.DriverAndYarn;
            case KUBERNETES:
                return ResourceType.Kubernetes;
            case DRIVER_AND_KUBERNETES:
                return ResourceType.DriverAndKubernetes;
            case SPECIAL:
                return ResourceType.Special;
            default:
                return ResourceType.LoadInstance;
        }
    }

    /**
     * A resource of a type, from amounts by dimension as the service names them; a missing dimension is zero.
     *
     * @param place queue or namespace of the resource
     */
    static Resource of(ResourceType type, Map<String, Long> amounts, String place) {
        switch (type) {
            case Memory:
                return new MemoryResource(amount(amounts, "memory"));
            case CPU:
                return new CPUResource(number(amount(amounts, "cores")));
            case Instance:
                return new InstanceResource(number(amount(amounts, "instances")));
            case LoadInstance:
                return driver(amounts);
            case Yarn:
                return yarn(amounts, place);
            case DriverAndYarn:
                return new DriverAndYarnResource(driver(amounts), yarn(amounts, place));
            case Kubernetes:
                return kubernetes(amounts, place);
            case DriverAndKubernetes:
                return new DriverAndKubernetesResource(driver(amounts), kubernetes(amounts, place));
            case Special:
                return special(amounts);
            default:
                return new LoadResource(amount(amounts, "memory"), number(amount(amounts, "cores")));
        }
    }

    /** The amounts of a resource by dimension, as the service names them, including those of all parts. */
    static Map<String, Long> dimensions(Resource resource) {
        Map<String, Long> amounts = new HashMap<>();
        collect(resource, amounts);
        return amounts;
    }

    /** Whether resources of this type have a queue or a namespace. */
    static boolean hasPlace(ResourceType type) {
        return type.name().endsWith("Yarn") || type.name().endsWith("Kubernetes");
    }

    /** Queue or namespace of a resource; null if its type has none. */
    static String place(Resource resource) {
        if (resource instanceof YarnResource) {
            return ((YarnResource) resource).getQueueName();
        } else if (resource instanceof DriverAndYarnResource) {
            return place(((DriverAndYarnResource) resource).getYarnResource());
        } else if (resource instanceof KubernetesResource) {
            return ((KubernetesResource) resource).getNamespace();
        } else if (resource instanceof DriverAndKubernetesResource) {
            return place(((DriverAndKubernetesResource) resource).getKubernetesResource());
        }
        return null;
    }

    /** YARN application of a resource; empty without one. */
    static String application(Resource resource) {
        if (resource instanceof DriverAndYarnResource) {
            return application(((DriverAndYarnResource) resource).getYarnResource());
        } else if (resource instanceof YarnResource) {
            String id = ((YarnResource) resource).getApplicationId();
            return id == null ? "" : id;
        }
        return "";
    }

    /** The resource with this YARN application, if its type has one. */
    static Resource withApplication(Resource resource, String id) {
        if (resource instanceof DriverAndYarnResource) {
            DriverAndYarnResource both = (DriverAndYarnResource) resource;
            return new DriverAndYarnResource(both.getLoadInstanceResource(), (YarnResource) withApplication(both.getYarnResource(), id));
        } else if (resource instanceof YarnResource) {
            YarnResource yarn = (YarnResource) resource;
            return new YarnResource(yarn.getQueueMemory(), yarn.getQueueCores(), yarn.getQueueInstances(), yarn.getQueueName(), id);
        }
        return resource;
    }

    /** A zero resource of the same type, queue and namespace. */
    static Resource nothing(Resource resource, ResourceType type) {
        return of(type, new HashMap<>(), place(resource));
    }

    private static void collect(Resource resource, Map<String, Long> amounts) {
        if (resource instanceof DriverAndYarnResource) {
            collect(((DriverAndYarnResource) resource).getLoadInstanceResource(), amounts);
            collect(((DriverAndYarnResource) resource).getYarnResource(), amounts);
        } else if (resource instanceof DriverAndKubernetesResource) {
            collect(((DriverAndKubernetesResource) resource).getLoadInstanceResource(), amounts);
            collect(((DriverAndKubernetesResource) resource).getKubernetesResource(), amounts);
        } else if (resource instanceof LoadInstanceResource) {
            LoadInstanceResource driver = (LoadInstanceResource) resource;
            amounts.put("memory", driver.getMemory());
            amounts.put("cores", (long) driver.getCores());
            amounts.put("instances", (long) driver.getInstances());
        } else if (resource instanceof YarnResource) {
            YarnResource yarn = (YarnResource) resource;
            amounts.put("queue_memory", yarn.getQueueMemory());
            amounts.put("queue_cores", (long) yarn.getQueueCores());
            amounts.put("queue_instances", (long) yarn.getQueueInstances());
        } else if (resource instanceof KubernetesResource) {
            KubernetesResource kubernetes = (KubernetesResource) resource;
            amounts.put("kubernetes_memory", kubernetes.getMemory());
            amounts.put("kubernetes_millicores", kubernetes.getCores());
        } else if (resource instanceof LoadResource) {
            amounts.put("memory", ((LoadResource) resource).getMemory());
            amounts.put("cores", (long) ((LoadResource) resource).getCores());
        } else if (resource instanceof MemoryResource) {
            amounts.put("memory", ((MemoryResource) resource).getMemory());
        } else if (resource instanceof InstanceResource) {
            amounts.put("instances", (long) ((InstanceResource) resource).getInstances());
        } else if (resource instanceof CPUResource) {
            amounts.put("cores", (long) ((CPUResource) resource).getCores());
        } else if (resource instanceof SpecialResource) {
            ((SpecialResource) resource).getResources().forEach((name, amount) -> amounts.put("special." + name, ((Number) amount).longValue()));
        }
    }

    private static LoadInstanceResource driver(linkis.rm.v1.LoadInstanceResource told) {
        return new LoadInstanceResource(told.getMemory(), number(told.getCores()), number(told.getInstances()));
    }

    private static LoadInstanceResource driver(Map<String, Long> amounts) {
        return new LoadInstanceResource(amount(amounts, "memory"), number(amount(amounts, "cores")), number(amount(amounts, "instances")));
    }

    private static YarnResource yarn(linkis.rm.v1.YarnResource told) {
        return new YarnResource(told.getQueueMemory(), number(told.getQueueCores()), number(told.getQueueInstances()),
                inPlace(told.getQueueName()), told.getApplicationId());
    }

    private static YarnResource yarn(Map<String, Long> amounts, String queue) {
        return new YarnResource(amount(amounts, "queue_memory"), number(amount(amounts, "queue_cores")),
                number(amount(amounts, "queue_instances")), inPlace(queue));
    }

    private static KubernetesResource kubernetes(linkis.rm.v1.KubernetesResource told) {
        return new KubernetesResource(told.getMemory(), told.getMillicores(), inPlace(told.getNamespace()));
    }

    private static KubernetesResource kubernetes(Map<String, Long> amounts, String namespace) {
        return new KubernetesResource(amount(amounts, "kubernetes_memory"), amount(amounts, "kubernetes_millicores"), inPlace(namespace));
    }

    private static SpecialResource special(Map<String, Long> amounts) {
        Map<String, Object> named = new HashMap<>();
        amounts.forEach((dimension, amount) -> {
            if (dimension.startsWith("special.")) {
                named.put(dimension.substring("special.".length()), amount);
            }
        });
        return new SpecialResource(named);
    }

    private static long amount(Map<String, Long> amounts, String dimension) {
        Long amount = amounts.get(dimension);
        return amount == null ? 0 : amount;
    }

    private static int number(long amount) {
        return (int) Math.max(Integer.MIN_VALUE, Math.min(Integer.MAX_VALUE, amount));
    }

    private static String inPlace(String name) {
        return name == null || name.isEmpty() ? "default" : name;
    }
}
