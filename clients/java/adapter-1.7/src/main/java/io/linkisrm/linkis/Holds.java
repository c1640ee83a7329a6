package io.linkisrm.linkis;

import java.time.Duration;
import linkis.rm.v1.HoldRequest;
import linkis.rm.v1.ReleaseHoldRequest;
import org.apache.linkis.common.ServiceInstance;
import org.apache.linkis.manager.common.entity.persistence.PersistenceLabel;
import org.apache.linkis.manager.common.entity.persistence.PersistenceLock;
import org.apache.linkis.manager.label.entity.Label;
import org.apache.linkis.manager.label.entity.em.EMInstanceLabel;

/** Holds in the service for Linkis's locks of an ECM, or of the user of a combined label. Other locks stay within Linkis. */
final class Holds {
    /** Duration of a lock in Linkis. */
    private static final Duration LONGEST = Duration.ofMinutes(10);

    private final Service service;

    Holds(Service service) {
        this.service = service;
    }

    void hold(Label<?> label, String user) {
        Object row = row(label);
        if (row == null) {
            return;
        }
        HoldRequest.Builder hold = HoldRequest.newBuilder().setDuration(Service.told(LONGEST))
                .setReason("locked by Linkis for " + (user == null || user.isEmpty() ? "itself" : user));
        if (row instanceof Scope) {
            hold.setUser(((Scope) row).user);
        } else {
            hold.setEm(Service.em((ServiceInstance) row));
        }
        service.hold(hold.build());
    }

    void release(Label<?> label) {
        release(row(label));
    }

    void release(PersistenceLock lock) {
        release(row(lock.getLockObject()));
    }

    /** The row of the mirror for a label; null without one. */
    static Object row(Label<?> label) {
        if (label instanceof EMInstanceLabel) {
            return ((EMInstanceLabel) label).getServiceInstance();
        }
        Object row = row(label.getStringValue());
        if (row == null && label instanceof PersistenceLabel && ((PersistenceLabel) label).getValue() != null) {
            java.util.Map<String, String> value = ((PersistenceLabel) label).getValue();
            if (value.containsKey("serviceName")) {
                ServiceInstance ecm = new ServiceInstance();
                ecm.setApplicationName(value.get("serviceName"));
                ecm.setInstance(value.get("instance"));
                return ecm;
            } else if (value.containsKey("user")) {
                return new Scope(value.get("user"), value.get("creator"), value.get("engineType") + "-" + value.get("version"));
            }
        }
        return row;
    }

    /** By the name in Linkis's locks: "APPLICATION-HOST:PORT", or "USER-CREATOR,ENGINE-VERSION". */
    private static Object row(String text) {
        String application = Heartbeats.application();
        if (text != null && text.startsWith(application + "-")) {
            ServiceInstance ecm = new ServiceInstance();
            ecm.setApplicationName(application);
            ecm.setInstance(text.substring(application.length() + 1));
            return ecm;
        }
        return text == null || text.startsWith("{") ? null : Scope.parse(text);
    }

    private void release(Object row) {
        if (row instanceof Scope) {
            service.releaseHold(ReleaseHoldRequest.newBuilder().setUser(((Scope) row).user).build());
        } else if (row != null) {
            service.releaseHold(ReleaseHoldRequest.newBuilder().setEm(Service.em((ServiceInstance) row)).build());
        }
    }
}
