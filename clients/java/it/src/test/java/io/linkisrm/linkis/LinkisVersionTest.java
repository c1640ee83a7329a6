package io.linkisrm.linkis;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import org.apache.linkis.common.ServiceInstance;
import org.junit.jupiter.api.Test;

/** Linkis versions that the adapter supports, and the error for others. */
class LinkisVersionTest {
    @Test
    void versions_are_told_by_the_names_of_jars() {
        assertEquals("1.7", LinkisVersion.of(ServiceInstance.class));
        assertEquals("1.8", LinkisVersion.ofJar("/opt/linkis/lib/linkis-commons/public-module/linkis-common-1.8.0.jar"));
        assertEquals("1.10", LinkisVersion.ofJar("/opt/linkis-1.7/linkis-common-1.10.0-SNAPSHOT.jar"));
        assertEquals("", LinkisVersion.ofJar("/opt/linkis/classes/"));
    }

    @Test
    void what_is_not_known_is_refused_with_the_line_to_change() {
        LinkisVersion.check("1.7");
        LinkisVersion.check("1.8");
        for (String other : new String[] {"", "1.6", "1.9", "2.0"}) {
            String said = assertThrows(SettingException.class, () -> LinkisVersion.check(other)).getMessage();
            assertTrue(said.contains(other.isEmpty() ? "an unknown version" : "Linkis " + other), said);
            assertTrue(said.contains("spring.linkis.rm.enabled=false"), said);
        }
    }
}
