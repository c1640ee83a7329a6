package io.linkisrm.it;

import org.apache.linkis.manager.label.entity.Label;

/** A label of any name, as a Linkis may have that somebody extended. */
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
