package io.linkisrm.linkis;

import org.springframework.beans.factory.BeanDefinitionStoreException;

/** A setting must change before the manager can start: the text names the line and its value. */
public final class SettingException extends BeanDefinitionStoreException {
    private static final long serialVersionUID = 1L;

    SettingException(String key, String problem) {
        super("linkis-rm: " + Settings.PREFIX + key + ": " + problem);
    }

    private SettingException(Throwable cause, String text) {
        super(text, cause);
    }

    /** Error of Linkis's database account. */
    static SettingException ofDatabase(String problem, Throwable cause) {
        return new SettingException(cause, "linkis-rm: wds.linkis.server.mybatis.datasource.username: " + problem);
    }

    SettingException(String key, String problem, Throwable cause) {
        super("linkis-rm: " + Settings.PREFIX + key + ": " + problem, cause);
    }
}
