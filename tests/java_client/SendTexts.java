import java.nio.charset.StandardCharsets;
import java.util.Scanner;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Sends a message for each text of standard input (hex after an x, one a line) with the official
 * producer: the text is its tag, its key, and the name and the value of a user property.
 *
 * <p>Usage: SendTexts NAME_SERVER TOPIC
 */
public final class SendTexts {
    public static void main(String[] arguments) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("java-judge");
        producer.setNamesrvAddr(arguments[0]);
        producer.setSendMsgTimeout(30_000);
        producer.start();
        MessageQueue queue = producer.fetchPublishMessageQueues(arguments[1]).get(0);
        Scanner lines = new Scanner(System.in);
        for (int number = 0; lines.hasNext(); number++) {
            String text = text(lines.next());
            Message message = new Message(arguments[1], text, text, ("body " + number).getBytes());
            message.putUserProperty("value", text);
            message.putUserProperty(text, "name");
            System.out.println("judge sent " + producer.send(message, queue).getMsgId());
        }
        System.out.println("judge end");
        System.out.flush();
        producer.shutdown();
        System.exit(0);
    }

    private static String text(String hex) {
        byte[] data = new byte[hex.length() / 2];
        for (int index = 0; index < data.length; index++) {
            data[index] = (byte) Integer.parseInt(hex.substring(2 * index + 1, 2 * index + 3), 16);
        }
        return new String(data, StandardCharsets.UTF_8);
    }
}
