"""A few sentences of the kinds of text the demo model meets, whose hidden states centre its router."""

SENTENCES: tuple[str, ...] = (
    "The committee met twice in the spring and agreed that the old bridge should be repaired before the rains came.",
    "To install the package, create a virtual environment, activate it, and run the setup command from its root "
    "folder.",
    "Each function returns a list of tuples; the first item is the key, and the second is the number of times "
    "it occurs.",
    "Water boils at 100 degrees Celsius at sea level, but at 3,000 metres it boils at about 90 degrees.",
    "<|im_start|>user\nCan you explain how plants make food?<|im_end|>\n<|im_start|>assistant\nPlants make food by "
    "photosynthesis: leaves take in carbon dioxide and light, and turn them into sugar and oxygen.<|im_end|>\n",
    "<|im_start|>user\nWrite a short story about a lighthouse.<|im_end|>\n<|im_start|>assistant\nOnce upon a time, on "
    "a small island, there stood a lighthouse whose keeper had not spoken to anyone for many years.<|im_end|>\n",
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n"
    "    return total / len(values)\n",
    "1. Wash the rice until the water runs clear.\n2. Add two cups of water.\n3. Cook over a low heat for 18 "
    "minutes.\n",
    "In 1969 two people walked on the Moon; their journey of 384,400 kilometres had taken a little more than three "
    "days.",
    'She opened the letter slowly. "I had hoped," it began, "that we would meet again, but it is not to be."',
    "| Option | Default | Meaning |\n| --- | --- | --- |\n| timeout | 30 | seconds to wait for an answer "
    "before giving up |",
    "If x + 3 = 7, then x = 4. More generally, subtract the same number from both sides and the equation still holds.",
)
