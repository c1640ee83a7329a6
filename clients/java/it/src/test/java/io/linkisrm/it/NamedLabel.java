package io.linkisrm.it;

import org.apache.linkis.manager.label.entity.Label;

/** A label with any name, as in an extended Linkis. */
public record NamedLabel(String key, String value) implements Label<String> {
    @Override
    public String getLabelKey() {
        return key;
    }

    @Override
    public String getValue() {
        return value;
    }

    @Override
    public String getStringValue() {
        return value;
    }

    @Override
    public Boolean isEmpty() {
        return value.isEmpty();
    }
}
