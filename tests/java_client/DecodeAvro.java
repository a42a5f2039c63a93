import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.HexFormat;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericDatumReader;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.io.DecoderFactory;

/**
 * Decodes bodies with a registry's header, given in hexadecimal digits on standard input.
 *
 * <p>Usage: DecodeAvro SCHEMA; prints the schema's id and the record as JSON.
 */
public final class DecodeAvro {
    public static void main(String[] arguments) throws Exception {
        Schema schema = new Schema.Parser().parse(arguments[0]);
        BufferedReader lines =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            byte[] body = HexFormat.of().parseHex(line.strip());
            if (body[0] != 0) {
                throw new IllegalArgumentException("no header of a registry");
            }
            GenericRecord order = new GenericDatumReader<GenericRecord>(schema)
                .read(null, DecoderFactory.get().binaryDecoder(body, 5, body.length - 5, null));
            int id = ByteBuffer.wrap(body, 1, 4).getInt();
            System.out.println("judge " + id + " " + order.toString().replace(" ", ""));
        }
        System.out.println("judge end");
    }
}
