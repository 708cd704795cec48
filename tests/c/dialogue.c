/* Records turns, retrieves them and their texts, opens a torn log, and checks refused arguments. */
#include "check.h"

enum { DIMENSION = 4, TURNS = 5 };

static dormouse_dialogue_options_t options_in(const char *dir)
{
    dormouse_dialogue_options_t options;
    DORMOUSE_INIT(&options);
    options.dimension = DIMENSION;
    options.alpha = 0.5f;
    options.decay_s = 10;
    options.dir = dir;
    return options;
}

static void refused_options(const char *dir)
{
    dormouse_dialogue_options_t options = options_in(dir);
    dormouse_dialogue_t *dialogue = NULL, *second = NULL;
    options.dimension = 0;
    RETURNS(dormouse_dialogue_create(&options, &dialogue), DORMOUSE_ERR_ARGUMENT, "dimension is 0; accepted: 1 to 4096");
    options = options_in(dir);
    options.alpha = 2;
    RETURNS(dormouse_dialogue_create(&options, &dialogue), DORMOUSE_ERR_ARGUMENT, "alpha is 2; accepted: 0 to 1");
    options = options_in(dir);
    options.entries_max = (1 << 20) + 1;
    RETURNS(dormouse_dialogue_create(&options, &dialogue), DORMOUSE_ERR_ARGUMENT, "entries_max is 1048577");
    options = options_in(dir);
    options.reserved = 3;
    RETURNS(dormouse_dialogue_create(&options, &dialogue), DORMOUSE_ERR_ARGUMENT, "options.reserved is 3; accepted: 0");
    options = options_in(dir);
    OK(dormouse_dialogue_create(&options, &dialogue));
    RETURNS(dormouse_dialogue_create(&options, &second), DORMOUSE_ERR_BUSY, "is in use by process");
    OK(dormouse_dialogue_destroy(dialogue));
    RETURNS(dormouse_dialogue_destroy(dialogue), DORMOUSE_ERR_STALE, "was destroyed");
    OK(dormouse_dialogue_destroy(NULL));
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        return 2;
    }
    refused_options(argv[1]);

    /* Turn i has the direction of axis i % 2, and the time i. */
    float embeddings[TURNS][DIMENSION] = {{0}};
    dormouse_turn_t turns[TURNS];
    memset(turns, 0, sizeof turns);
    for (int at = 0; at < TURNS; at++) {
        embeddings[at][at % 2] = 3;
        turns[at].embedding = embeddings[at];
        turns[at].dimension = DIMENSION;
        turns[at].query = (dormouse_bytes_t){"asked", 5};
        turns[at].passage = (dormouse_bytes_t){"01234" + at, (uint64_t)(TURNS - at)};
        turns[at].time_s = at;
    }
    dormouse_dialogue_options_t options = options_in(argv[1]);
    dormouse_dialogue_t *dialogue = NULL;
    uint64_t first = 9, count = 0;
    OK(dormouse_dialogue_create(&options, &dialogue));
    OK(dormouse_dialogue_record(dialogue, turns, 3, &first));
    EXPECT(first == 0);
    OK(dormouse_dialogue_record(dialogue, turns + 3, 2, &first));
    EXPECT(first == 3);
    turns[1].dimension = 3;
    RETURNS(dormouse_dialogue_record(dialogue, turns, 2, &first), DORMOUSE_ERR_ARGUMENT,
            "embedding has 3 numbers; accepted: 4 to 4");
    turns[1].dimension = DIMENSION;
    turns[1].query.bytes = NULL;
    RETURNS(dormouse_dialogue_record(dialogue, turns, 2, &first), DORMOUSE_ERR_NULL, "query");

    dormouse_query_t query = {embeddings[0], DIMENSION, 4, 3, DORMOUSE_QUERY_BEST};
    dormouse_found_t found[3];
    OK(dormouse_dialogue_retrieve(dialogue, &query, NULL, 0, &count));
    EXPECT(count == 3);
    RETURNS(dormouse_dialogue_retrieve(dialogue, &query, found, 2, &count), DORMOUSE_ERR_LIMIT, "at least 3");
    OK(dormouse_dialogue_retrieve(dialogue, &query, found, 3, &count));
    /* Those of its direction, the last one first. */
    EXPECT(found[0].id == 4 && found[1].id == 2 && found[2].id == 0);
    EXPECT(found[0].weight == 1 && found[0].relevance == 1 && found[0].recency == 1 && found[0].time_s == 4);
    EXPECT(found[1].recency > 0.818f && found[1].recency < 0.819f);
    query.kind = DORMOUSE_QUERY_CHAIN;
    query.entries_max = 2;
    OK(dormouse_dialogue_retrieve(dialogue, &query, found, 3, &count));
    EXPECT(count == 2 && found[0].id == 4 && found[1].id == 2);
    query.kind = 2;
    RETURNS(dormouse_dialogue_retrieve(dialogue, &query, found, 3, &count), DORMOUSE_ERR_ARGUMENT, "kind is 2");
    query.kind = DORMOUSE_QUERY_BEST;
    query.entries_max = 1025;
    RETURNS(dormouse_dialogue_retrieve(dialogue, &query, found, 3, &count), DORMOUSE_ERR_ARGUMENT, "count is 1025");
    query.entries_max = 3;
    RETURNS(dormouse_dialogue_retrieve(dialogue, NULL, found, 3, &count), DORMOUSE_ERR_NULL, "query");

    uint64_t lengths[9] = {0}, bytes = 0;
    char texts[64] = "";
    found[0].id = 99;
    RETURNS(dormouse_dialogue_retrieve_texts(dialogue, &query, found, lengths, 3, &count, texts, 23, &bytes),
            DORMOUSE_ERR_LIMIT, "capacities are 3 and 23; accepted: at least 3 and 24");
    RETURNS(dormouse_dialogue_retrieve_texts(dialogue, &query, found, lengths, 2, &count, texts, 64, &bytes),
            DORMOUSE_ERR_LIMIT, "capacities are 2 and 64; accepted: at least 3 and 24");
    EXPECT(found[0].id == 99 && lengths[0] == 0 && texts[0] == 0 && count == 3 && bytes == 24);
    OK(dormouse_dialogue_retrieve_texts(dialogue, &query, NULL, NULL, 0, &count, NULL, 0, &bytes));
    OK(dormouse_dialogue_retrieve_texts(dialogue, &query, found, lengths, 3, &count, texts, 24, &bytes));
    EXPECT(found[0].id == 4 && found[1].id == 2 && found[2].id == 0);
    EXPECT(bytes == 24 && memcmp(texts, "asked4asked234asked01234", 25) == 0);
    EXPECT(lengths[3] == 5 && lengths[4] == 3 && lengths[5] == 0 && lengths[7] == 5);

    char text[16] = "";
    OK(dormouse_dialogue_get_text(dialogue, 2, DORMOUSE_TEXT_PASSAGE, text, sizeof text, &count));
    EXPECT(count == 3 && memcmp(text, "234", 3) == 0);
    OK(dormouse_dialogue_get_text(dialogue, 2, DORMOUSE_TEXT_RESPONSE, text, sizeof text, &count));
    EXPECT(count == 0);
    RETURNS(dormouse_dialogue_get_text(dialogue, 2, DORMOUSE_TEXT_QUERY, text, 4, &count), DORMOUSE_ERR_LIMIT, "");
    EXPECT(count == 5);
    RETURNS(dormouse_dialogue_get_text(dialogue, 5, 0, text, 4, &count), DORMOUSE_ERR_ARGUMENT, "id is 5");
    RETURNS(dormouse_dialogue_get_text(dialogue, 2, 3, text, 4, &count), DORMOUSE_ERR_ARGUMENT, "text is 3");
    dormouse_dialogue_stats_t stats;
    DORMOUSE_INIT(&stats);
    OK(dormouse_dialogue_get_stats(dialogue, &stats));
    EXPECT(stats.entries == TURNS && stats.forgotten_entries == 0 && stats.summaries == 1);
    OK(dormouse_dialogue_destroy(dialogue));

    /* The last record is cut in its middle. */
    char path[512];
    snprintf(path, sizeof path, "%s/dialogue.dormouse", argv[1]);
    EXPECT(truncate(path, (off_t)stats.log_bytes - 9) == 0);
    OK(dormouse_dialogue_create(&options, &dialogue));
    OK(dormouse_dialogue_get_stats(dialogue, &stats));
    EXPECT(stats.entries == TURNS - 1);
    char torn[256];
    OK(dormouse_dialogue_get_torn(dialogue, torn, sizeof torn, &count));
    EXPECT(strstr(torn, "ends early") != NULL);
    OK(dormouse_dialogue_retrieve(dialogue, &query, found, 3, &count));
    EXPECT(count == 3 && found[0].id == 2);
    OK(dormouse_dialogue_destroy(dialogue));

    /* Damage before it is refused. */
    FILE *file = fopen(path, "r+b");
    EXPECT(file != NULL && fseek(file, 60, SEEK_SET) == 0 && fputc(1, file) == 1 && fclose(file) == 0);
    RETURNS(dormouse_dialogue_create(&options, &dialogue), DORMOUSE_ERR_CORRUPT, "checksum");
    return done("dialogue");
}
