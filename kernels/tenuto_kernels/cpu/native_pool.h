// The threads that share an operator's work items. Owner of the state: one pool a process, made at first use, never
// destroyed (its threads sleep when idle and die with the process).
//
// Not OpenMP, for one reason: a parallel region there ends only when every thread of the team has arrived, so that on a
// machine busy with other work each operator waits for a thread that the scheduler has not even run. Here the caller
// takes items like everyone else and waits only for items that somebody has begun; a pool whose threads get no
// processor costs nothing, and the operator runs at the speed of one thread. After a fork the same holds.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

class Pool {
  public:
    static Pool& shared() {
        static Pool* pool = new Pool;
        return *pool;
    }

    // Calls work(i) once for each i in [0, count), on at most `threads` threads, the caller among them. A caller that
    // finds the pool busy with another caller's work does its own alone.
    template <typename Work>
    void run(int64_t count, int threads, const Work& work) {
        std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (threads <= 1 || count <= 1 || !turn.owns_lock()) {
            for (int64_t i = 0; i < count; i++) work(i);
            return;
        }
        grow(threads - 1);
        call_ = [](const void* w, int64_t i) { (*(const Work*)w)(i); };
        work_ = &work;
        count_ = count;
        done_.store(0, std::memory_order_relaxed);
        helpers_.store(threads - 1, std::memory_order_relaxed);
        const uint64_t job = ((state_.load(std::memory_order_relaxed) >> 32) + 1) << 32;
        state_.store(job | (uint64_t)count);
        if (asleep_.load() > 0) {
            std::lock_guard<std::mutex> lock(sleep_);
            wake_.notify_all();
        }
        while (take()) {}
        for (int spins = 0; done_.load(std::memory_order_acquire) < count; spins++)
            if (spins < 2000) pause();
            else std::this_thread::yield();  // the other's item is begun but its thread has lost the processor
    }

  private:
    static constexpr int SPINS = 4000;  // some 100 us: longer than the gap between two operators of a decode step

    // Low 32 bits: items not yet taken; high: the job's number. One word, so that a thread that comes late can never
    // take an item of one job while holding another's function.
    std::atomic<uint64_t> state_{0};
    std::atomic<int64_t> done_{0};
    std::atomic<int> asleep_{0}, helpers_{0};
    void (*call_)(const void*, int64_t) = nullptr;
    const void* work_ = nullptr;
    int64_t count_ = 0;
    int workers_ = 0;
    std::mutex turn_, sleep_;
    std::condition_variable wake_;

    static void pause() {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    bool take() {
        uint64_t state = state_.load();
        do {
            if ((uint32_t)state == 0) return false;
        } while (!state_.compare_exchange_weak(state, state - 1));
        // The job cannot end before this item is done: its fields are safe to read now, and only now.
        call_(work_, count_ - (int64_t)(uint32_t)state);
        done_.fetch_add(1, std::memory_order_release);
        return true;
    }

    void grow(int wanted) {
        for (; workers_ < wanted; workers_++) std::thread(&Pool::serve, this, workers_).detach();
    }

    void serve(int index) {
        for (;;) {
            for (int spins = 0; spins < SPINS; spins++) {
                if (index < helpers_.load(std::memory_order_relaxed) && take()) spins = 0;
                else pause();
            }
            std::unique_lock<std::mutex> lock(sleep_);
            asleep_.fetch_add(1);
            wake_.wait(lock, [&] { return (uint32_t)state_.load() != 0 && index < helpers_.load(); });
            asleep_.fetch_sub(1);
        }
    }
};
