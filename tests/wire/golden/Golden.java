import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Scanner;
import java.util.TreeMap;
import org.apache.rocketmq.acl.common.AclUtils;
import org.apache.rocketmq.client.ClientConfig;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.selector.SelectMessageQueueByHash;
import org.apache.rocketmq.client.rpchook.NamespaceRpcHook;
import org.apache.rocketmq.client.trace.TraceBean;
import org.apache.rocketmq.client.trace.TraceContext;
import org.apache.rocketmq.client.trace.TraceDataEncoder;
import org.apache.rocketmq.client.trace.TraceType;
import org.apache.rocketmq.common.MQVersion;
import org.apache.rocketmq.common.compression.CompressionType;
import org.apache.rocketmq.common.compression.CompressorFactory;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageClientIDSetter;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.common.message.MessageType;
import org.apache.rocketmq.common.utils.MessageUtils;
import org.apache.rocketmq.remoting.protocol.LanguageCode;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.remoting.protocol.SerializeType;
import org.apache.rocketmq.remoting.protocol.header.SendMessageRequestHeader;
import org.apache.rocketmq.remoting.protocol.header.SendMessageRequestHeaderV2;
import org.apache.rocketmq.remoting.protocol.header.SendMessageResponseHeader;
import org.apache.rocketmq.remoting.protocol.route.BrokerData;
import org.apache.rocketmq.remoting.protocol.route.QueueData;
import org.apache.rocketmq.remoting.protocol.route.TopicRouteData;

/**
 * What the real Java classes make of seeded random values, one case a line: the word judge (logs go
 * to the same stream), a kind and its fields, separated by blanks. Text and bytes are hex after an x
 * ("-" is null), maps are m and name=value pairs joined by commas. With the argument "decode" instead
 * of a seed, reads lines from standard input: "frame HEX" is answered with the frame's description,
 * "inflate KIND HEX" with the inflated body.
 */
public class Golden {
    static final String ALPHABET =
        "abcXYZ019 %|_-\"\\/\u0001\u0002\t\n\u007f\u0085\u00e9\u00df\u2028\u4e2d\u6587\u8ba2\u5355\uffee";
    static Random random;

    public static void main(String[] arguments) throws Exception {
        System.setProperty(RemotingCommand.REMOTING_VERSION_KEY, Integer.toString(MQVersion.CURRENT_VERSION));
        if (arguments[0].equals("decode")) {
            decode();
            print("end");
            return;
        }
        random = new Random(Long.parseLong(arguments[0]));
        for (MQVersion.Version version : MQVersion.Version.values()) {
            print("version", version.name(), version.ordinal());
        }
        for (int round = 0; round < 60; round++) {
            for (SerializeType type : SerializeType.values()) {
                frame(type);
                sendRequest(type);
                sendResponse(type);
            }
            batch();
            properties();
            ids();
            hash();
            signature();
            stored();
            compressed();
        }
        for (int round = 0; round < 10; round++) {
            route();
            trace();
        }
        print("end");
    }

    static void print(Object... values) {
        StringBuilder line = new StringBuilder();
        for (Object value : values) {
            line.append(line.length() == 0 ? "" : " ").append(value);
        }
        System.out.println("judge " + line);
    }

    static String hex(byte[] data) {
        if (data == null) {
            return "-";
        }
        StringBuilder text = new StringBuilder("x");
        for (byte one : data) {
            text.append(String.format("%02x", one));
        }
        return text.toString();
    }

    static String hex(String text) {
        return text == null ? "-" : hex(text.getBytes(StandardCharsets.UTF_8));
    }

    static String hex(Map<String, String> map) {
        if (map == null) {
            return "-";
        }
        StringBuilder text = new StringBuilder("m");
        for (Map.Entry<String, String> entry : new TreeMap<>(map).entrySet()) {
            text.append(text.length() == 1 ? "" : ",").append(hex(entry.getKey())).append('=')
                .append(hex(entry.getValue()));
        }
        return text.toString();
    }

    static byte[] bytes(int longest) {
        byte[] data = new byte[random.nextInt(longest + 1)];
        random.nextBytes(data);
        return data;
    }

    static String text(int shortest, int longest) {
        StringBuilder text = new StringBuilder();
        int length = shortest + random.nextInt(longest - shortest + 1);
        while (text.length() < length) {
            if (random.nextInt(20) == 0) {
                text.appendCodePoint(0x1F300 + random.nextInt(100));
            } else {
                text.append(ALPHABET.charAt(random.nextInt(ALPHABET.length())));
            }
        }
        return text.toString();
    }

    static String clean(int shortest, int longest) {
        return text(shortest, longest).replace('\u0001', 'p').replace('\u0002', 'q');
    }

    static HashMap<String, String> map(int most, boolean clean) {
        HashMap<String, String> map = new HashMap<>();
        for (int count = random.nextInt(most + 1); count > 0; count--) {
            // RocketMQ 5.5.0's own JSON reader (fastjson2 2.0.59) fails on a name with four bytes a character.
            String name = (clean ? clean(1, 12) : text(1, 12)).replaceAll("[\\x{10000}-\\x{10ffff}]", "u");
            map.put(name, clean ? clean(1, 30) : text(1, 30));
        }
        return map;
    }

    static String describe(RemotingCommand command) {
        return command.getCode() + " " + command.getOpaque() + " " + command.getFlag() + " "
            + command.getVersion() + " " + command.getLanguage().getCode() + " "
            + hex(command.getRemark()) + " " + hex(command.getExtFields()) + " " + hex(command.getBody());
    }

    static void emit(String kind, SerializeType type, RemotingCommand command) throws Exception {
        command.setSerializeTypeCurrentRPC(type);
        byte[] encoded = command.encode().array();
        RemotingCommand again = RemotingCommand.decode(ByteBuffer.wrap(encoded, 4, encoded.length - 4).slice());
        print(kind, type.name().toLowerCase(), hex(encoded), describe(again));
    }

    static void frame(SerializeType type) throws Exception {
        RemotingCommand command = RemotingCommand.createRequestCommand(random.nextInt(2000), null);
        command.setOpaque(random.nextInt());
        command.setFlag(random.nextInt(4));
        LanguageCode[] languages = LanguageCode.values();
        command.setLanguage(languages[random.nextInt(languages.length)]);
        command.setVersion(random.nextInt(600));
        if (random.nextBoolean()) {
            command.setRemark("remark " + random.nextInt());
        }
        if (random.nextBoolean()) {
            command.setExtFields(map(8, false));
        }
        if (random.nextBoolean()) {
            command.setBody(bytes(40));
        }
        emit("frame", type, command);
    }

    static void sendRequest(SerializeType type) throws Exception {
        SendMessageRequestHeader header = new SendMessageRequestHeader();
        header.setProducerGroup(clean(1, 20));
        header.setTopic(clean(1, 20));
        header.setDefaultTopic("TBW102");
        header.setDefaultTopicQueueNums(random.nextInt(16));
        header.setQueueId(random.nextInt(16));
        header.setSysFlag(random.nextInt(0x400));
        header.setBornTimestamp(random.nextLong() & Long.MAX_VALUE);
        header.setFlag(random.nextInt());
        header.setProperties(MessageDecoder.messageProperties2String(map(5, true)) + "UNIQ_KEY\u00010A\u0002");
        header.setReconsumeTimes(0);
        header.setBatch(random.nextBoolean());
        header.setBrokerName(clean(1, 10));
        SendMessageRequestHeaderV2 v2 = SendMessageRequestHeaderV2.createSendMessageRequestHeaderV2(header);
        RemotingCommand command = RemotingCommand.createRequestCommand(header.isBatch() ? 320 : 310, v2);
        command.setLanguage(LanguageCode.PYTHON);
        emit("send", type, command);
    }

    static void sendResponse(SerializeType type) throws Exception {
        SendMessageResponseHeader header = new SendMessageResponseHeader();
        header.setMsgId(hex(bytes(16)));
        header.setQueueId(random.nextInt(16));
        header.setQueueOffset(random.nextLong() & Long.MAX_VALUE);
        if (random.nextBoolean()) {
            header.setTransactionId(clean(1, 32));
        }
        RemotingCommand command = RemotingCommand.createResponseCommandWithHeader(0, header);
        command.setOpaque(random.nextInt(1 << 30));
        command.addExtField("MSG_REGION", "DefaultRegion");
        command.addExtField("TRACE_ON", "true");
        emit("answer", type, command);
    }

    static void batch() {
        List<Message> messages = new ArrayList<>();
        StringBuilder fields = new StringBuilder();
        for (int count = 1 + random.nextInt(4); count > 0; count--) {
            Message message = new Message("topic", bytes(60));
            message.setFlag(random.nextInt());
            map(4, true).forEach((name, value) -> MessageAccessor.putProperty(message, name, value));
            messages.add(message);
            fields.append(fields.length() == 0 ? "" : ";").append(message.getFlag()).append(':')
                .append(hex(message.getBody())).append(':')
                .append(hex(MessageDecoder.messageProperties2String(message.getProperties())));
        }
        print("batch", fields, hex(MessageDecoder.encodeMessages(messages)));
    }

    static void properties() {
        HashMap<String, String> map = map(5, true);
        String encoded = MessageDecoder.messageProperties2String(map);
        LinkedHashMap<String, String> ordered = new LinkedHashMap<>(map);
        StringBuilder names = new StringBuilder();
        for (Map.Entry<String, String> entry : ordered.entrySet()) {
            names.append(names.length() == 0 ? "" : ",").append(hex(entry.getKey())).append('=')
                .append(hex(entry.getValue()));
        }
        print("properties", "m" + names, hex(encoded));
        String wild = text(0, 12).replace('a', '\u0001').replace('b', '\u0002').replace('c', '\u0002')
            .replace('X', '\u0001');
        print("parse", hex(wild), hex(MessageDecoder.string2messageProperties(wild)));
        String name = wild.isEmpty() ? "k" : wild.substring(0, 1);
        if (name.charAt(0) > 2 && !Character.isSurrogate(name.charAt(0))) {
            print("delete", hex(wild), hex(name), hex(MessageUtils.deleteProperty(wild, name)));
        }
    }

    static void ids() throws Exception {
        byte[] address = new byte[random.nextBoolean() ? 4 : 16];
        random.nextBytes(address);
        InetSocketAddress host = new InetSocketAddress(InetAddress.getByAddress(address), random.nextInt(65536));
        long offset = random.nextLong() & Long.MAX_VALUE;
        print("offset-id", hex(address), host.getPort(), offset, MessageDecoder.createMessageId(host, offset));
        String id = MessageClientIDSetter.createUniqID();
        // Within the id's own millisecond Java dates it a month back.
        Thread.sleep(2);
        print("unique-id", id, hex(MessageClientIDSetter.getIPFromID(id)), MessageClientIDSetter.getPidFromID(id),
            MessageClientIDSetter.getNearlyTimeFromID(id).getTime(), System.currentTimeMillis());
    }

    static void hash() {
        String key = text(0, 20);
        int count = 1 + random.nextInt(64);
        List<MessageQueue> queues = new ArrayList<>();
        for (int queue = 0; queue < count; queue++) {
            queues.add(new MessageQueue("t", "b", queue));
        }
        int chosen = new SelectMessageQueueByHash().select(queues, null, key).getQueueId();
        print("hash", hex(key), key.hashCode(), count, chosen);
    }

    static void signature() throws Exception {
        RemotingCommand command = RemotingCommand.createRequestCommand(310, null);
        HashMap<String, String> fields = map(8, false);
        fields.put("AccessKey", clean(1, 12));
        command.setExtFields(fields);
        command.setBody(random.nextBoolean() ? bytes(50) : null);
        String secret = clean(1, 12);
        byte[] content = AclUtils.combineRequestContent(command, new TreeMap<>(fields));
        print("signature", hex(fields), hex(command.getBody()), hex(secret), AclUtils.calSignature(content, secret));
    }

    static void stored() throws Exception {
        MessageExt message = new MessageExt();
        message.setTopic(clean(1, 30));
        message.setBody(bytes(60));
        message.setFlag(random.nextInt());
        message.setQueueId(random.nextInt(16));
        message.setQueueOffset(random.nextLong());
        message.setCommitLogOffset(random.nextLong() & Long.MAX_VALUE);
        message.setBornTimestamp(random.nextLong());
        message.setStoreTimestamp(random.nextLong());
        message.setReconsumeTimes(random.nextInt());
        message.setPreparedTransactionOffset(random.nextLong());
        byte[] address = new byte[4];
        random.nextBytes(address);
        message.setBornHost(new InetSocketAddress(InetAddress.getByAddress(address), 1234));
        if (random.nextBoolean()) {
            address = new byte[16];
            random.nextBytes(address);
            message.setSysFlag(1 << 5);
        }
        message.setStoreHost(new InetSocketAddress(InetAddress.getByAddress(address), 10911));
        map(4, true).forEach((name, value) -> MessageAccessor.putProperty(message, name, value));
        byte[] encoded = MessageDecoder.encode(message, false);
        MessageExt again = MessageDecoder.decode(ByteBuffer.wrap(encoded));
        print("stored", hex(encoded), hex(again.getTopic()), hex(again.getBody()), again.getFlag(), again.getQueueId(),
            again.getQueueOffset(), again.getCommitLogOffset(), again.getBornTimestamp(), again.getStoreTimestamp(),
            again.getReconsumeTimes(), again.getPreparedTransactionOffset(), again.getMsgId(), hex(again.getProperties()));
    }

    static void compressed() throws Exception {
        byte[] body = new byte[random.nextInt(4000)];
        for (int at = 0; at < body.length; at++) {
            body[at] = (byte) (random.nextInt(8) == 0 ? random.nextInt() : 'a');
        }
        CompressionType type = CompressionType.values()[random.nextInt(3)];
        print("compressed", type.getCompressionFlag(), hex(body), hex(CompressorFactory.getCompressor(type).compress(body, 5)));
    }

    static void route() {
        TopicRouteData route = new TopicRouteData();
        List<QueueData> queues = new ArrayList<>();
        List<BrokerData> brokers = new ArrayList<>();
        StringBuilder fields = new StringBuilder();
        for (int broker = 1 + random.nextInt(3); broker > 0; broker--) {
            QueueData queue = new QueueData();
            queue.setBrokerName("broker-" + broker);
            queue.setReadQueueNums(random.nextInt(16));
            queue.setWriteQueueNums(random.nextInt(16));
            queue.setPerm(random.nextInt(8));
            queues.add(queue);
            HashMap<Long, String> addresses = new HashMap<>();
            for (long id = random.nextInt(2); id < 3; id++) {
                addresses.put(id, "10.0.0." + id + ":10911,{0:\"x\",7:");
            }
            brokers.add(new BrokerData("cluster", "broker-" + broker, addresses));
            fields.append(fields.length() == 0 ? "" : ";").append(queue.getBrokerName()).append(':')
                .append(queue.getReadQueueNums()).append(':').append(queue.getWriteQueueNums()).append(':')
                .append(queue.getPerm()).append(':').append(addresses.size());
        }
        route.setQueueDatas(queues);
        route.setBrokerDatas(brokers);
        route.setFilterServerTable(new HashMap<>());
        route.setOrderTopicConf(random.nextBoolean() ? "broker-1:4;broker-2:8" : null);
        print("route", fields, hex(route.getOrderTopicConf()), hex(route.encode()));
    }

    static void trace() {
        TraceContext context = new TraceContext();
        TraceBean bean = new TraceBean();
        context.setTraceBeans(new ArrayList<>(Arrays.asList(bean)));
        context.setTraceType(new TraceType[] {TraceType.Pub, TraceType.EndTransaction}[random.nextInt(2)]);
        context.setTimeStamp(random.nextLong() & Long.MAX_VALUE);
        context.setRegionId("DefaultRegion");
        context.setGroupName(clean(1, 10));
        context.setCostTime(random.nextInt(5000));
        context.setSuccess(random.nextBoolean());
        bean.setTopic(clean(1, 10));
        bean.setMsgId(hex(bytes(16)));
        bean.setTags(clean(1, 5));
        bean.setKeys("k1 k2");
        bean.setStoreHost("127.0.0.1:10911");
        bean.setBodyLength(random.nextInt(9999));
        bean.setMsgType(MessageType.values()[random.nextInt(5)]);
        bean.setOffsetMsgId(hex(bytes(16)));
        bean.setTransactionId("T1");
        bean.setTransactionState(LocalTransactionState.values()[random.nextInt(3)]);
        bean.setFromTransactionCheck(random.nextBoolean());
        List<String> keys = new ArrayList<>(TraceDataEncoder.encoderFromContextBean(context).getTransKey());
        java.util.Collections.sort(keys);
        print("trace", hex(TraceDataEncoder.encoderFromContextBean(context).getTransData()), hex(String.join(" ", keys)));
    }

    static byte[] unhex(String text) {
        byte[] data = new byte[text.length() / 2];
        for (int at = 0; at < data.length; at++) {
            data[at] = (byte) Integer.parseInt(text.substring(2 * at, 2 * at + 2), 16);
        }
        return data;
    }

    static void decode() throws Exception {
        Scanner lines = new Scanner(System.in, "UTF-8");
        while (lines.hasNextLine()) {
            String[] fields = lines.nextLine().split(" ");
            if (fields[0].equals("frame")) {
                byte[] data = unhex(fields[1]);
                print(describe(RemotingCommand.decode(ByteBuffer.wrap(data, 4, data.length - 4).slice())));
            } else if (fields[0].equals("namespace")) {
                ClientConfig config = new ClientConfig();
                config.setNamespaceV2(new String(unhex(fields[1]), StandardCharsets.UTF_8));
                RemotingCommand command = RemotingCommand.createRequestCommand(310, null);
                new NamespaceRpcHook(config).doBeforeRequest("broker", command);
                print(hex(command.getExtFields()));
            } else {
                CompressionType type = CompressionType.of(fields[1]);
                print(hex(CompressorFactory.getCompressor(type).decompress(unhex(fields[2]))));
            }
        }
    }
}
