import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;
import java.util.Scanner;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageDecoder;

/**
 * What the official client says of texts, one a line of standard input (hex after an x): whether a
 * user property may have it as its value and as its name, and whether it comes out of the wire form
 * of properties as it went in.
 */
public final class Texts {
    public static void main(String[] arguments) {
        Scanner lines = new Scanner(System.in);
        while (lines.hasNext()) {
            String text = text(lines.next());
            System.out.println("judge text " + isTaken("name", text) + " " + isTaken(text, "value")
                + " " + isCarried("name", text) + " " + isCarried(text, "value"));
        }
        System.out.println("judge end");
    }

    private static boolean isTaken(String name, String value) {
        try {
            new Message("topic", new byte[1]).putUserProperty(name, value);
            return true;
        } catch (RuntimeException refused) {
            return false;
        }
    }

    private static boolean isCarried(String name, String value) {
        Map<String, String> properties = new HashMap<>();
        properties.put("before", "b");
        properties.put(name, value);
        properties.put("behind", "b");
        String wire = MessageDecoder.messageProperties2String(properties);
        return MessageDecoder.string2messageProperties(wire).equals(properties);
    }

    private static String text(String hex) {
        byte[] data = new byte[hex.length() / 2];
        for (int index = 0; index < data.length; index++) {
            data[index] = (byte) Integer.parseInt(hex.substring(2 * index + 1, 2 * index + 3), 16);
        }
        return new String(data, StandardCharsets.UTF_8);
    }
}
