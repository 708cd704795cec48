/* Records rollouts, drafts from them, saves and loads them, and checks refused arguments. */
#include "check.h"

enum { VOCAB = 1000, PROMPT = 12, RESPONSE = 20, ROOM = 40 };

static dormouse_tokens_t narrow(const int32_t *ids, uint64_t count)
{
    dormouse_tokens_t it = {ids, count, 4, 0};
    return it;
}

static dormouse_history_t *created(const char *dir, uint64_t budget_bytes, uint64_t cold_bytes)
{
    dormouse_history_options_t options;
    DORMOUSE_INIT(&options);
    options.vocab = VOCAB;
    options.budget_bytes = budget_bytes;
    options.dir = dir;
    options.cold_bytes = cold_bytes;
    dormouse_history_t *history = NULL;
    OK(dormouse_history_create(&options, &history));
    return history;
}

static void refused_options(const char *dir)
{
    dormouse_history_options_t options;
    dormouse_history_t *history = NULL;
    DORMOUSE_INIT(&options);
    RETURNS(dormouse_history_create(&options, &history), DORMOUSE_ERR_ARGUMENT, "vocab is 0; accepted: 1 to 2147483648");
    options.vocab = VOCAB;
    options.epochs_kept = 65;
    RETURNS(dormouse_history_create(&options, &history), DORMOUSE_ERR_ARGUMENT, "epochs_kept is 65; accepted: 1 to 64");
    options.epochs_kept = 0;
    options.weighing = 2;
    RETURNS(dormouse_history_create(&options, &history), DORMOUSE_ERR_ARGUMENT, "weighing is 2");
    options.weighing = DORMOUSE_WEIGHING_COUNT;
    options.cold_bytes = 4096;
    RETURNS(dormouse_history_create(&options, &history), DORMOUSE_ERR_ARGUMENT, "without options.dir");
    options.cold_bytes = 0;
    options.reserved = 3;
    RETURNS(dormouse_history_create(&options, &history), DORMOUSE_ERR_ARGUMENT, "options.reserved is 3; accepted: 0");
    options.reserved = 0;
    options.dir = dir;
    OK(dormouse_history_create(&options, &history));
    dormouse_history_t *second = NULL;
    RETURNS(dormouse_history_create(&options, &second), DORMOUSE_ERR_BUSY, "is in use by process");
    OK(dormouse_history_destroy(history));
    OK(dormouse_history_create(&options, &second));
    OK(dormouse_history_destroy(second));
    RETURNS(dormouse_history_destroy(second), DORMOUSE_ERR_STALE, "this history was destroyed");
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        return 2;
    }
    refused_options(argv[1]);

    int32_t prompt[PROMPT], response[RESPONSE], sequence[PROMPT + RESPONSE], drafted[ROOM];
    int64_t wide[RESPONSE];
    for (int at = 0; at < PROMPT; at++) {
        sequence[at] = prompt[at] = 100 + at;
    }
    for (int at = 0; at < RESPONSE; at++) {
        sequence[PROMPT + at] = response[at] = 500 + at * at;
        wide[at] = response[at];
    }
    dormouse_rollout_t rollouts[3];
    memset(rollouts, 0, sizeof rollouts);
    for (int at = 0; at < 3; at++) {
        rollouts[at].prompt = narrow(prompt, PROMPT);
        rollouts[at].response = narrow(response, RESPONSE);
        rollouts[at].reward = (float)at;
    }
    rollouts[1].response = (dormouse_tokens_t){wide, RESPONSE, 8, 0};

    dormouse_history_t *history = created(argv[1], 1 << 20, 1 << 20);
    uint64_t recorded = 0;
    OK(dormouse_history_record(history, rollouts, 3, &recorded));
    EXPECT(recorded == 3);
    /* The last one is refused, those before it are recorded. */
    int32_t outside[2] = {1, VOCAB};
    rollouts[2].response = narrow(outside, 2);
    RETURNS(dormouse_history_record(history, rollouts, 3, &recorded), DORMOUSE_ERR_ARGUMENT,
            "id 1 of response is 1000; accepted: 0 to 999");
    EXPECT(recorded == 2);
    outside[1] = -7;
    RETURNS(dormouse_history_record(history, rollouts, 3, &recorded), DORMOUSE_ERR_ARGUMENT, "is -7");
    rollouts[0].response.id_bytes = 3;
    RETURNS(dormouse_history_record(history, rollouts, 1, &recorded), DORMOUSE_ERR_ARGUMENT, "id_bytes is 3");
    rollouts[0].response = narrow(response, RESPONSE);
    rollouts[0].response.reserved = 3;
    RETURNS(dormouse_history_record(history, rollouts, 1, &recorded), DORMOUSE_ERR_ARGUMENT,
            "reserved of response is 3; accepted: 0");
    rollouts[0].response.reserved = 0;
    RETURNS(dormouse_history_record(history, NULL, 1, &recorded), DORMOUSE_ERR_NULL, "rollouts");

    /* A whole response by drafts that are always right: windows of 2, 4, 6 and 8 tokens. */
    dormouse_draft_t draft;
    memset(&draft, 0, sizeof draft);
    dormouse_tokens_t all = narrow(prompt, PROMPT);
    OK(dormouse_history_digest(&all, &draft.prompt));
    draft.ids = drafted;
    draft.capacity = ROOM;
    uint64_t at = PROMPT;
    for (uint32_t window = 2; window <= 8; window += 2) {
        draft.end = narrow(sequence, at);
        OK(dormouse_history_draft(history, &draft, 1));
        EXPECT(draft.window_tokens == window && draft.count == window && draft.matched_tokens == 7);
        EXPECT(memcmp(drafted, sequence + at, window * sizeof *drafted) == 0);
        at += window;
        draft.accepted = draft.count;
        OK(dormouse_history_feedback(history, &draft, 1));
        EXPECT(draft.window_tokens == window + 2 && draft.count == 0);
    }
    EXPECT(at == PROMPT + RESPONSE);
    /* The response ends there. */
    draft.end = narrow(sequence, at);
    OK(dormouse_history_draft(history, &draft, 1));
    EXPECT(draft.count == 0 && draft.window_tokens == 10);
    draft.accepted = 1;
    RETURNS(dormouse_history_feedback(history, &draft, 1), DORMOUSE_ERR_ARGUMENT, "accepted is 1; accepted: at most 0");
    /* A rejection starts again. */
    draft.end = narrow(sequence, PROMPT);
    draft.capacity = 3;
    OK(dormouse_history_draft(history, &draft, 1));
    EXPECT(draft.count == 3);
    draft.accepted = 2;
    OK(dormouse_history_feedback(history, &draft, 1));
    EXPECT(draft.window_tokens == 2);
    draft.ids = NULL;
    RETURNS(dormouse_history_draft(history, &draft, 1), DORMOUSE_ERR_NULL, "ids");
    draft.ids = drafted;
    draft.reserved = 3;
    RETURNS(dormouse_history_draft(history, &draft, 1), DORMOUSE_ERR_ARGUMENT, "reserved of a draft is 3; accepted: 0");
    RETURNS(dormouse_history_feedback(history, &draft, 1), DORMOUSE_ERR_ARGUMENT, "reserved of a draft is 3; accepted: 0");
    draft.reserved = 0;

    /* No draft is changed where the ids of one are not aligned. */
    int32_t untouched[ROOM + 1];
    memset(untouched, 0x5a, sizeof untouched);
    dormouse_draft_t odd[2];
    odd[0] = odd[1] = draft;
    odd[0].count = odd[1].count = 7;
    odd[0].ids = drafted;
    odd[1].ids = (int32_t *)((char *)untouched + 1);
    drafted[0] = -1;
    RETURNS(dormouse_history_draft(history, odd, 2), DORMOUSE_ERR_ARGUMENT, "ids");
    EXPECT(odd[0].count == 7 && odd[1].count == 7 && drafted[0] == -1);
    for (size_t byte = 0; byte < sizeof untouched; byte++) {
        EXPECT(((unsigned char *)untouched)[byte] == 0x5a);
    }

    /* An unknown prompt has no draft. */
    dormouse_draft_t both[2];
    both[0] = both[1] = draft;
    both[0].prompt.low++;
    OK(dormouse_history_draft(history, both, 2));
    EXPECT(both[0].count == 0 && both[1].count == 2);

    dormouse_history_stats_t stats;
    DORMOUSE_INIT(&stats);
    OK(dormouse_history_get_stats(history, &stats));
    EXPECT(stats.prompts == 1 && stats.tokens == 7 * RESPONSE && stats.forgotten_prompts == 0);
    EXPECT(stats.drafted_tokens == 23 && stats.accepted_tokens == 22);

    /* Cold, and back. */
    OK(dormouse_history_release(history, 0));
    OK(dormouse_history_get_stats(history, &stats));
    EXPECT(stats.bytes == 0 && stats.cold_prompts == 1 && stats.cold_bytes >= 4096);
    OK(dormouse_history_draft(history, &draft, 1));
    EXPECT(draft.count == 2);
    char text[256];
    uint64_t needed = 0;
    OK(dormouse_history_get_failure(history, text, sizeof text, &needed));
    EXPECT(needed == 1 && text[0] == '\0');

    /* Saved, and loaded by the next history in that directory. */
    OK(dormouse_history_save(history));
    OK(dormouse_history_destroy(history));
    history = created(argv[1], 1 << 20, 0);
    OK(dormouse_history_draft(history, &draft, 1));
    EXPECT(draft.count == 2 && drafted[0] == 500);
    OK(dormouse_history_destroy(history));
    history = created(NULL, 0, 0);
    RETURNS(dormouse_history_save(history), DORMOUSE_ERR_STATE, "no directory");
    rollouts[0].response.id_bytes = 4;
    OK(dormouse_history_record(history, rollouts, 1, &recorded));
    OK(dormouse_history_get_stats(history, &stats));
    EXPECT(stats.prompts == 0 && stats.forgotten_prompts == 1);
    OK(dormouse_history_destroy(history));
    OK(dormouse_history_destroy(NULL));

    /* A damaged file is refused, and stays as it is. */
    char path[512];
    snprintf(path, sizeof path, "%s/history.dormouse", argv[1]);
    FILE *file = fopen(path, "r+b");
    EXPECT(file != NULL && fseek(file, 40, SEEK_SET) == 0 && fputc(1, file) == 1 && fclose(file) == 0);
    dormouse_history_options_t options;
    DORMOUSE_INIT(&options);
    options.vocab = VOCAB;
    options.dir = argv[1];
    RETURNS(dormouse_history_create(&options, &history), DORMOUSE_ERR_CORRUPT, "checksum");
    return done("history");
}
