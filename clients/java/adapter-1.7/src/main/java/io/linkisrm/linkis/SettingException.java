package io.linkisrm.linkis;

import org.springframework.beans.factory.BeanDefinitionStoreException;

/** Something in the configuration has to be changed before the manager can start: the text says which line, and to what. */
public final class SettingException extends BeanDefinitionStoreException {
    private static final long serialVersionUID = 1L;

    SettingException(String key, String problem) {
        super("linkis-rm: " + Settings.PREFIX + key + ": " + problem);
    }

    SettingException(String key, String problem, Throwable cause) {
        super("linkis-rm: " + Settings.PREFIX + key + ": " + problem, cause);
    }
}
