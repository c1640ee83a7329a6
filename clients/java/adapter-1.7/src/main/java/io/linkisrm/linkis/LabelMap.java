package io.linkisrm.linkis;

import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Collection;
import java.util.Collections;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Set;
import org.apache.linkis.manager.common.exception.RMErrorException;
import org.apache.linkis.manager.label.entity.CombinedLabel;
import org.apache.linkis.manager.label.entity.Label;
import org.apache.linkis.manager.label.entity.ResourceLabel;
import org.apache.linkis.manager.label.entity.engine.EngineTypeLabel;
import org.apache.linkis.manager.label.entity.engine.UserCreatorLabel;
import org.apache.linkis.manager.rm.exception.RMErrorCode;

/** Converts Linkis's labels to those of the service. */
final class LabelMap {
    private static final int LABELS_MAX = 32;
    private static final int CHARS_MAX = 255;
    /** Maximum size of all names and values together. */
    private static final int BYTES_MAX = 6 * 1024;

    /** Labels that the service derives and a request must not set. */
    private static final Set<String> DERIVED = Collections.unmodifiableSet(new HashSet<>(Arrays.asList(
            "user", "creator", "engine_type", "engine_family", "em_application", "em", "queue", "namespace")));

    private LabelMap() {}

    /**
     * All labels except those with a field of their own: user, engine type and ECM. A label without a value is omitted.
     *
     * @throws RMErrorException if the service does not accept a label, which the text names
     */
    static Map<String, String> of(Collection<Label<?>> labels) {
        Map<String, String> map = new LinkedHashMap<>();
        int bytes = 0;
        for (Label<?> label : labels) {
            if (label instanceof ResourceLabel || label instanceof CombinedLabel || label instanceof UserCreatorLabel
                    || label instanceof EngineTypeLabel) {
                continue;
            }
            String value = label.getStringValue();
            if (value == null || value.isEmpty()) {
                continue;
            }
            check(label.getLabelKey(), value);
            String replaced = map.put(label.getLabelKey(), value);
            bytes += bytes(value) + (replaced == null ? bytes(label.getLabelKey()) : -bytes(replaced));
            if (map.size() > LABELS_MAX) {
                throw refused(label.getLabelKey(), "is one too many: there may be " + LABELS_MAX);
            }
            if (bytes > BYTES_MAX) {
                throw refused(label.getLabelKey(), "is too much: with it, all have " + bytes + " bytes, and there may be " + BYTES_MAX);
            }
        }
        return map;
    }

    private static void check(String key, String value) {
        if (DERIVED.contains(key)) {
            throw refused(key, "has a name that the service reserves for derived labels");
        }
        if (key.length() > CHARS_MAX) {
            throw refused(key, "has a name of more than " + CHARS_MAX + " characters");
        }
        if (value.codePointCount(0, value.length()) > CHARS_MAX) {
            throw refused(key, "has a value of more than " + CHARS_MAX + " characters");
        }
        if (value.chars().anyMatch(Character::isISOControl) || key.chars().anyMatch(Character::isISOControl)) {
            throw refused(key, "has a control character in it");
        }
    }

    private static int bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8).length;
    }

    private static RMErrorException refused(String key, String problem) {
        String name = key.length() > CHARS_MAX ? key.substring(0, CHARS_MAX) + "…" : key;
        return new RMErrorException(RMErrorCode.LABEL_RESOURCE_NOT_FOUND.getErrorCode(),
                "The label " + name + " is refused by the resource manager: it " + problem);
    }
}
