package io.linkisrm.linkis;

import java.util.Arrays;
import java.util.Objects;
import org.apache.linkis.manager.label.builder.CombinedLabelBuilder;
import org.apache.linkis.manager.label.builder.factory.LabelBuilderFactoryContext;
import org.apache.linkis.manager.label.entity.CombinedLabel;
import org.apache.linkis.manager.label.entity.Label;
import org.apache.linkis.manager.label.entity.engine.EngineTypeLabel;
import org.apache.linkis.manager.label.entity.engine.UserCreatorLabel;
import org.apache.linkis.manager.label.exception.LabelErrorException;
import org.apache.linkis.manager.rm.domain.RMLabelContainer;

/** Linkis's key for counting a user's engines: the user, the creator and the engine type with its version. */
final class Scope {
    final String user;
    final String creator;
    /** Engine type as in the service, e.g. "spark-3.2.1". */
    final String engineType;

    Scope(String user, String creator, String engineType) {
        this.user = user;
        this.creator = creator;
        this.engineType = engineType;
    }

    /** The scope of a request. */
    static Scope of(RMLabelContainer labels) {
        UserCreatorLabel who = labels.getUserCreatorLabel();
        return new Scope(who.getUser(), who.getCreator(), labels.getEngineTypeLabel().getStringValue());
    }

    /** Parses the text in Linkis's records, e.g. "hadoop-IDE,spark-3.2.1"; null for any other text. */
    static Scope parse(String text) {
        int comma = text == null ? -1 : text.indexOf(',');
        int dash = comma < 0 ? -1 : text.substring(0, comma).indexOf('-');
        return dash <= 0 ? null : new Scope(text.substring(0, dash), text.substring(dash + 1, comma), text.substring(comma + 1));
    }

    UserCreatorLabel userCreator() {
        UserCreatorLabel label = LabelBuilderFactoryContext.getLabelBuilderFactory().createLabel(UserCreatorLabel.class);
        label.setUser(user);
        label.setCreator(creator);
        return label;
    }

    EngineTypeLabel engineTypeLabel() {
        EngineTypeLabel label = LabelBuilderFactoryContext.getLabelBuilderFactory().createLabel(EngineTypeLabel.class);
        int dash = engineType.indexOf('-');
        label.setEngineType(dash < 0 ? engineType : engineType.substring(0, dash));
        label.setVersion(dash < 0 ? "*" : engineType.substring(dash + 1));
        return label;
    }

    /** The label of the row. */
    CombinedLabel combined() {
        try {
            return (CombinedLabel) new CombinedLabelBuilder().build("", new java.util.ArrayList<Label<?>>(
                    Arrays.<Label<?>>asList(userCreator(), engineTypeLabel())));
        } catch (LabelErrorException e) {
            throw new IllegalStateException("no combined label of " + this, e);
        }
    }

    @Override
    public boolean equals(Object other) {
        return other instanceof Scope && user.equals(((Scope) other).user) && creator.equals(((Scope) other).creator)
                && engineType.equals(((Scope) other).engineType);
    }

    @Override
    public int hashCode() {
        return Objects.hash(user, creator, engineType);
    }

    @Override
    public String toString() {
        return user + "-" + creator + "," + engineType;
    }
}
