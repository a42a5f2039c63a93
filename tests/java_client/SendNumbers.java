import java.util.Scanner;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.common.message.Message;

/**
 * Sends a message for each whole number of standard input with the official producer and
 * SelectMessageQueueByHash, to which it gives the number as the type that it is told.
 *
 * <p>Usage: SendNumbers NAME_SERVER TOPIC String|Long|Integer. Lines: sent NUMBER BROKER QUEUE
 */
public final class SendNumbers {
    public static void main(String[] arguments) throws Exception {
        // Threads of the client would keep a process alive whose main thread has failed.
        Thread.setDefaultUncaughtExceptionHandler((thread, error) -> {
            error.printStackTrace();
            System.exit(1);
        });
        DefaultMQProducer producer = new DefaultMQProducer("java-judge");
        producer.setNamesrvAddr(arguments[0]);
        producer.setSendMsgTimeout(30_000);
        producer.start();
        Scanner lines = new Scanner(System.in);
        while (lines.hasNext()) {
            String text = lines.next();
            Message message = new Message(arguments[1], "tag", text, text.getBytes());
            SendResult result = null;
            while (result == null) {
                try {
                    result = producer.send(
                        message, new SelectMessageQueueByHash(), key(arguments[2], text));
                } catch (MQBrokerException busy) {
                    // The broker has answered that it did not store the message.
                    Thread.sleep(100);
                }
            }
            System.out.println("judge sent " + text + " " + result.getMessageQueue().getBrokerName()
                + " " + result.getMessageQueue().getQueueId());
        }
        System.out.println("judge end");
        System.out.flush();
        producer.shutdown();
        System.exit(0);
    }

    private static Object key(String type, String text) {
        switch (type) {
            case "Long":
                return Long.valueOf(text);
            case "Integer":
                return Integer.valueOf(text);
            default:
                return text;
        }
    }
}
