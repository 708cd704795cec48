/* dormouse through its C ABI, on the stand-in driver. Everything that is on by default is on. */
#include <dormouse.h>

#include <cstdlib>
#include <exception>

#include "device.h"
#include "workload.h"

void Contender::start(unsigned streams)
{
    device_start(streams);
    dormouse_torch_set_graph_hooks(1); /* as dormouse.install() says it: nothing here captures */
    if (const char *events = getenv("OURS_HISTORY_EVENTS")) {
        dormouse_torch_record_history(strtoull(events, nullptr, 10), 0, 0, 0);
    }
}

void Contender::start_thread()
{
    device_start_thread();
}

void *Contender::allocate(size_t bytes, unsigned stream)
{
    try {
        return dormouse_torch_malloc((intptr_t)bytes, 0, device.streams[stream]);
    } catch (const std::exception &) {
        return nullptr;
    }
}

void Contender::release(void *block, size_t bytes, unsigned stream)
{
    dormouse_torch_free(block, bytes, 0, device.streams[stream]);
}

void Contender::use(unsigned stream)
{
    device_use(stream);
}

/* A scope of a trace is one layer of a prefix forward, and is entered as a trainer enters it: in the
 * window of a layer of a node. Other memory in between ends a window; what the same layer asks for
 * behind it comes in the window of a layer more. Nothing is named dormant, so nothing sleeps. */
static struct {
    dormouse_runtime_t *runtime;
    dormouse_prefix_t *node;
    uint32_t layer;
    bool is_open;
} prefix;

/* Windows of one node: far more than a trace has. */
enum { PREFIX_LAYERS = 1024, PREFIX_ID = 0 };

static void done(dormouse_status_t status)
{
    if (status < 0) {
        fprintf(stderr, "dormouse: %s\n", dormouse_get_last_error());
        exit(1);
    }
}

static void begin_node()
{
    if (prefix.runtime == nullptr) {
        dormouse_options_t options;
        DORMOUSE_INIT(&options);
        options.device_kind = DORMOUSE_DEVICE_CUDA;
        done(dormouse_runtime_create(&options, &prefix.runtime));
    }
    prefix.layer = 0;
    done(dormouse_prefix_create(prefix.runtime, nullptr, PREFIX_ID, PREFIX_LAYERS, &prefix.node));
    done(dormouse_prefix_enter_phase(prefix.node, DORMOUSE_PHASE_A, nullptr));
}

void Contender::launch(unsigned stream)
{
    device_launch(stream);
}

void Contender::enter_scope(unsigned scope)
{
    if (prefix.is_open) {
        prefix.is_open = false;
        done(dormouse_prefix_mark_edge(prefix.node, DORMOUSE_EDGE_FORWARD_END, prefix.layer++, nullptr));
    }
    if (scope == 0) {
        return;
    }
    if (prefix.node == nullptr) {
        begin_node();
    }
    prefix.is_open = true;
    done(dormouse_prefix_mark_edge(prefix.node, DORMOUSE_EDGE_FORWARD_BEGIN, prefix.layer, nullptr));
}

void Contender::end_scopes()
{
    done(dormouse_prefix_enter_phase(prefix.node, DORMOUSE_PHASE_B, nullptr));
    done(dormouse_prefix_destroy(prefix.node));
    prefix.node = nullptr;
}

void Contender::mark()
{
    device_mark();
}

void Contender::report()
{
    dormouse_stats_t stats;
    DORMOUSE_INIT(&stats);
    if (dormouse_torch_get_stats(0, &stats, nullptr, 0, nullptr) >= 0) {
        printf(", \"own_reserved_bytes\": %lu", stats.mapped.peak_bytes);
    }
    device_report();
}
