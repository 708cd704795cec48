//! A system that refuses: a filter on the calling thread, as a container's. Tests only.
#![allow(unsafe_code, reason = "raw system calls")]

/// Makes a system call fail with `errno` on this thread, for good; where `second` is given, only
/// with that second argument.
pub fn refuse(call: libc::c_long, second: Option<u32>, errno: i32) {
    const NUMBER_AT: u32 = 0;
    const SECOND_AT: u32 = 16 + 8;
    let load = |at| filter((libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, 0, 0, at);
    let equals =
        |value, no| filter((libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16, 0, no, value);
    let give = |value| filter((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, value);
    let mut program = vec![load(NUMBER_AT)];
    match second {
        None => program.push(equals(call as u32, 1)),
        Some(second) => {
            program.extend([equals(call as u32, 3), load(SECOND_AT), equals(second, 1)])
        }
    }
    program.push(give(libc::SECCOMP_RET_ERRNO | errno as u32));
    program.push(give(libc::SECCOMP_RET_ALLOW));
    let all = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: plain numbers; then a live program whose length is right.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const all) == 0
    };
    assert!(done, "{}", std::io::Error::last_os_error());
}

const fn filter(code: u16, jt: u8, jf: u8, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt, jf, k }
}

/// Lets this process create files of that length at most. A longer one is an error or a signal.
pub fn limit_files(bytes: u64) {
    let limit = libc::rlimit64 { rlim_cur: bytes, rlim_max: libc::RLIM64_INFINITY };
    // SAFETY: plain system calls; the limit is a live local.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_DFL);
        assert_eq!(libc::setrlimit64(libc::RLIMIT_FSIZE, &raw const limit), 0);
    }
}
