import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * For each topic on standard input: what has come to its queues since the last time, by the official
 * consumer. A broker that does not answer is left for the next time.
 *
 * <p>Usage: FollowTopics NAME_SERVER. Lines, where WHOLE says that no property of the sender lacks:
 *
 * <pre>
 * judge message BROKER QUEUE OFFSET ID WHOLE BODY
 * judge skipped BROKER QUEUE FIRST END
 * judge failed BROKER REASON
 * judge end
 * </pre>
 */
public final class FollowTopics {
    private static final long TIMEOUT_MS = 10_000;
    private static final Map<String, Map<MessageQueue, Long>> OFFSETS = new HashMap<>();

    public static void main(String[] arguments) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer("soak-judge");
        consumer.setNamesrvAddr(arguments[0]);
        consumer.start();
        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        for (String topic = input.readLine(); topic != null; topic = input.readLine()) {
            follow(consumer, topic);
            System.out.println("judge end");
            System.out.flush();
        }
        System.exit(0);
    }

    private static void follow(DefaultMQPullConsumer consumer, String topic) {
        // A route may lack a broker that was there before: its queues are still asked.
        Map<MessageQueue, Long> known = OFFSETS.computeIfAbsent(topic, name -> new TreeMap<>());
        Set<String> silent = new HashSet<>();
        try {
            for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(topic)) {
                known.putIfAbsent(queue, -1L);
            }
        } catch (Exception error) {
            failed("route", error);
        }
        for (Map.Entry<MessageQueue, Long> entry : known.entrySet()) {
            String broker = entry.getKey().getBrokerName();
            if (silent.contains(broker)) {
                continue;
            }
            try {
                read(consumer, entry);
            } catch (Exception error) {
                silent.add(broker);
                failed(broker, error);
            }
        }
    }

    private static void read(DefaultMQPullConsumer consumer, Map.Entry<MessageQueue, Long> entry)
            throws Exception {
        MessageQueue queue = entry.getKey();
        long end = consumer.maxOffset(queue);
        if (entry.getValue() < 0) {
            entry.setValue(consumer.minOffset(queue));
        }
        while (entry.getValue() < end) {
            long offset = entry.getValue();
            PullResult result = consumer.pull(queue, "*", offset, 256, TIMEOUT_MS);
            long expected = offset;
            if (result.getPullStatus() == PullStatus.FOUND) {
                for (MessageExt message : result.getMsgFoundList()) {
                    skipped(queue, expected, message.getQueueOffset());
                    print(queue, message);
                    expected = message.getQueueOffset() + 1;
                    entry.setValue(expected);
                }
            }
            long next = Math.min(end, result.getNextBeginOffset());
            skipped(queue, expected, next);
            if (Math.max(expected, next) == offset) {
                // The end of a queue may show before it can be read.
                return;
            }
            entry.setValue(Math.max(expected, next));
        }
    }

    private static void failed(String what, Exception error) {
        System.out.println("judge failed " + what + " " + error.toString().replaceAll("\\s+", " "));
    }

    private static void skipped(MessageQueue queue, long first, long end) {
        if (first < end) {
            System.out.println("judge skipped " + queue.getBrokerName() + " " + queue.getQueueId()
                + " " + first + " " + end);
        }
    }

    private static void print(MessageQueue queue, MessageExt message) throws Exception {
        StringBuilder line = new StringBuilder("judge message ").append(queue.getBrokerName());
        Map<String, String> has = message.getProperties();
        line.append(' ').append(queue.getQueueId()).append(' ').append(message.getQueueOffset());
        line.append(' ').append(message.getMsgId()).append(' ');
        line.append(has.containsKey("UNIQ_KEY") && has.containsKey("__SHARDINGKEY") ? 1 : 0);
        line.append(' ');
        for (byte one : message.getBody()) {
            line.append(Character.forDigit(one >> 4 & 15, 16)).append(Character.forDigit(one & 15, 16));
        }
        System.out.println(line);
    }
}
