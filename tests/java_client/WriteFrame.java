import org.apache.spark.sql.SparkSession;

/**
 * Writes ten rows to the topic t by format("rocketmq"), as a Java program does.
 *
 * <p>Usage: spark-submit --class WriteFrame ... NAME_SERVER
 */
public final class WriteFrame {
    public static void main(String[] arguments) {
        SparkSession spark = SparkSession.builder().getOrCreate();
        spark.range(10).selectExpr("concat('java ', cast(id AS string)) AS body")
            .write().format("rocketmq").mode("append")
            .option("nameServer", arguments[0]).option("topic", "t").save();
        spark.stop();
    }
}
