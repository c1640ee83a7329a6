package io.linkisrm.linkis;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.linkisrm.it.NamedLabel;
import java.util.ArrayList;
import java.util.List;
import org.apache.linkis.manager.common.exception.RMErrorException;
import org.apache.linkis.manager.label.entity.Label;
import org.junit.jupiter.api.Test;

/** Labels that Linkis accepts and the service does not: the error names the label. */
class LabelMapTest {
    @Test
    void what_the_service_does_not_take_is_refused_by_name() {
        String[][] wrong = {
            {"user", "a", "has a name that the service reserves"},
            {"queue", "a", "has a name that the service reserves"},
            {"x".repeat(256), "a", "has a name of more than 255"},
            {"region", "x".repeat(256), "has a value of more than 255"},
            {"region", "a\nb", "has a control character"},
            {"re\tgion", "a", "has a control character"},
        };
        for (String[] one : wrong) {
            refused(one[0], one[2], List.of(new NamedLabel("good", "a"), new NamedLabel(one[0], one[1])));
        }
    }

    @Test
    void one_label_more_than_the_service_takes_is_refused_by_name() {
        List<Label<?>> labels = many(32, "a");
        assertEquals(32, LabelMap.of(labels).size());
        labels.add(new NamedLabel("one-more", "a"));
        refused("one-more", "is one too many: there may be 32", labels);
    }

    @Test
    void more_than_the_service_takes_of_all_labels_together_is_refused_by_name() {
        // 768 bytes each, with the name: 6144, which is the maximum.
        List<Label<?>> labels = many(8, "用".repeat(255));
        assertEquals(8, LabelMap.of(labels).size());
        labels.add(new NamedLabel("k00", "of two by one name, the last counts"));
        labels.add(new NamedLabel("r", "x".repeat(100)));
        assertEquals(9, LabelMap.of(labels).size());
        labels.add(new NamedLabel("one-more", "用".repeat(255)));
        refused("one-more", "is too much: with it, all have 6288 bytes", labels);
    }

    private static List<Label<?>> many(int number, String value) {
        List<Label<?>> labels = new ArrayList<>();
        for (int i = 0; i < number; i++) {
            labels.add(new NamedLabel(String.format("k%02d", i), value));
        }
        return labels;
    }

    private static void refused(String key, String problem, List<Label<?>> labels) {
        String said = assertThrows(RMErrorException.class, () -> LabelMap.of(labels)).getMessage();
        assertTrue(said.contains("The label " + key.substring(0, Math.min(255, key.length()))) && said.contains(problem), said);
    }
}
