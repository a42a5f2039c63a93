import java.nio.charset.StandardCharsets;
import java.security.MessageDigest;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * Reads every queue of a topic from its oldest to its newest message with the official consumer, and
 * prints a line for each message and for each range of offsets that the consumer went over without a
 * message. Compiles against the clients of RocketMQ 4.9 and 5.x.
 *
 * <p>Usage: ReadTopic NAME_SERVER TOPIC LONGEST, where longer bodies are printed by digest only.
 * Lines (text and bytes are hex after an x, "-" is null, maps are name=value pairs after an m):
 *
 * <pre>
 * message BROKER QUEUE OFFSET SYS_FLAG BORN_MS STORE_MS OFFSET_ID ID KEYS TAGS PROPERTIES LENGTH SHA256 BODY
 * skipped BROKER QUEUE FIRST END
 * </pre>
 */
public final class ReadTopic {
    private static final int EMPTY_PULLS = 100;
    private static final long PAUSE_MS = 50;
    private static final long TIMEOUT_MS = 30_000;

    public static void main(String[] arguments) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("java-judge");
        consumer.setNamesrvAddr(arguments[0]);
        consumer.start();
        for (MessageQueue queue : new TreeSet<>(consumer.fetchSubscribeMessageQueues(arguments[1]))) {
            read(consumer, queue, Integer.parseInt(arguments[2]));
        }
        System.out.println("judge end");
        System.out.flush();
        consumer.shutdown();
        System.exit(0);
    }

    private static void read(DefaultMQPullConsumer consumer, MessageQueue queue, int longest)
            throws Exception {
        long end = consumer.maxOffset(queue);
        long offset = consumer.minOffset(queue);
        int empty = 0;
        while (offset < end) {
            PullResult result = consumer.pull(queue, "*", offset, 32, TIMEOUT_MS);
            long expected = offset;
            if (result.getPullStatus() == PullStatus.FOUND) {
                for (MessageExt message : result.getMsgFoundList()) {
                    skipped(queue, expected, message.getQueueOffset());
                    print(queue, message, longest);
                    expected = message.getQueueOffset() + 1;
                }
            }
            skipped(queue, expected, Math.min(end, result.getNextBeginOffset()));
            // A broker may show the end of a queue before it can read the message there.
            empty = result.getNextBeginOffset() > offset ? 0 : empty + 1;
            if (empty > EMPTY_PULLS) {
                skipped(queue, offset, end);
                return;
            }
            if (empty > 0) {
                Thread.sleep(PAUSE_MS);
            }
            offset = Math.max(offset, result.getNextBeginOffset());
        }
    }

    private static void skipped(MessageQueue queue, long first, long end) {
        if (first < end) {
            print("skipped", queue.getBrokerName(), queue.getQueueId(), first, end);
        }
    }

    private static void print(MessageQueue queue, MessageExt message, int longest)
            throws Exception {
        byte[] body = message.getBody();
        print("message", queue.getBrokerName(), message.getQueueId(), message.getQueueOffset(),
            message.getSysFlag(), message.getBornTimestamp(), message.getStoreTimestamp(),
            // MessageClientExt.getMsgId is the client's id, where there is one.
            message.getClass().getMethod("getOffsetMsgId").invoke(message), message.getMsgId(),
            hex(message.getKeys()), hex(message.getTags()), hex(message.getProperties()),
            body.length, hex(MessageDigest.getInstance("SHA-256").digest(body)),
            body.length > longest ? "-" : hex(body));
    }

    private static void print(Object... values) {
        StringBuilder line = new StringBuilder("judge");
        for (Object value : values) {
            line.append(' ').append(value);
        }
        System.out.println(line);
    }

    private static String hex(String text) {
        return text == null ? "-" : hex(text.getBytes(StandardCharsets.UTF_8));
    }

    private static String hex(Map<String, String> map) {
        StringBuilder text = new StringBuilder("m");
        for (Map.Entry<String, String> entry : new TreeMap<>(map).entrySet()) {
            text.append(text.length() == 1 ? "" : ",").append(hex(entry.getKey())).append('=')
                .append(hex(entry.getValue()));
        }
        return text.toString();
    }

    private static String hex(byte[] data) {
        char[] text = new char[1 + 2 * data.length];
        text[0] = 'x';
        for (int index = 0; index < data.length; index++) {
            text[1 + 2 * index] = Character.forDigit(data[index] >> 4 & 15, 16);
            text[2 + 2 * index] = Character.forDigit(data[index] & 15, 16);
        }
        return new String(text);
    }
}
