# Templates in number; the object's code is compared.
cat > heavy.cpp <<'CPP'
#include <algorithm>
#include <iostream>
#include <map>
#include <regex>
#include <string>
#include <tuple>
#include <vector>
template <int N> struct Sum { static constexpr long value = N + Sum<N - 1>::value; };
template <> struct Sum<0> { static constexpr long value = 0; };
template <int... I> long tuples(std::integer_sequence<int, I...>) {
    auto all = std::make_tuple(std::map<int, std::tuple<std::integral_constant<int, I>>>()...);
    return static_cast<long>(std::tuple_size<decltype(all)>::value);
}
int main() {
    std::vector<std::string> words{"b", "a", "c"};
    std::sort(words.begin(), words.end());
    std::cout << Sum<800>::value << tuples(std::make_integer_sequence<int, 60>())
              << std::regex_match(words[0], std::regex("a+")) << '\n';
}
CPP
g++ -O2 -std=c++17 -o heavy heavy.cpp
./heavy
sha256sum < heavy
