import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;

/**
 * Sends COUNT messages with a delay, by its level or in milliseconds, with the official producer.
 *
 * <p>Usage: SendDelayed NAME_SERVER TOPIC delay_level|delay_ms DELAY COUNT. Lines: sent ID
 */
public final class SendDelayed {
    public static void main(String[] arguments) throws Exception {
        DefaultMQProducer producer = new DefaultMQProducer("java-delayed");
        producer.setNamesrvAddr(arguments[0]);
        producer.setSendMsgTimeout(30_000);
        producer.start();
        for (int number = 0; number < Integer.parseInt(arguments[4]); number++) {
            Message message = new Message(arguments[1], ("java-" + number).getBytes());
            if (arguments[2].equals("delay_level")) {
                message.setDelayTimeLevel(Integer.parseInt(arguments[3]));
            } else {
                message.setDelayTimeMs(Long.parseLong(arguments[3]));
            }
            System.out.println("judge sent " + producer.send(message).getMsgId());
        }
        System.out.println("judge end");
        System.out.flush();
        producer.shutdown();
        System.exit(0);
    }
}
