"""Plain English words and loose sentences around them, so that the tokenizer meets most spellings.

The topics in `_public_words.py` use few words in many orders. A byte-level BPE trained on those
alone spends its merges on whole words and splits every other text into many tokens, and a model
trained on those alone is overconfident on new text.
"""

from __future__ import annotations

LOOSE: list[str] = [
    "The {adjective} {noun} {past} the {noun}[ {adverb}].",
    "{first} {past} and {past} a(n) {adjective} {noun}.",
    "We are {gerund} the {noun} {preposition} the {noun}.",
    "Why did they {verb} the {noun} {preposition} our {adjective} {noun}?",
    "A(n) {noun} is {adjective}, a(n) {noun} is {adjective}.",
    "She {adverb} {third} each {noun}, {joiner} he {third} the {noun}.",
    "It was a(n) {adjective} {noun}; nobody {past} it.",
    "You can {verb} or {verb} the {noun}, but not the {adjective} {noun}.",
    "No {noun} was {past} {preposition} the {noun} until {weekday}.",
    "I have {past} my {noun} {joiner} I will {verb} yours {adverb}.",
    "Spelling list {n}: {noun}, {adjective}, {noun}, {adverb}, {adjective}, {noun}.",
    "Words of the week: {noun}; {adjective}; {verb}; {noun}; {adverb}.",
    "Crossword: {noun} - {adjective} - {noun}, {d2} points.",
    "There were {d3} {things} {preposition} the {noun}, most of them {adjective}.",
    "{hero} will {verb} her {noun} if the {noun} seems {adjective}.",
    "The {animals} were {adjective}, though {hero} {past} {adverb}.",
    "{pronoun} {third} {whose} {noun} {preposition} {whose} {noun}[, {adverb}].",
    "{pronoun} {past} {whose} {noun}; {pronoun} {past} ours {adverb}.",
    "Still {gerund}, {adverb}, {preposition} {whose} {adjective} {noun}.",
    "A little {adjective} {noun}, {adjective} {noun}, no {noun}.",
    "{first} says {pronoun} {third} {noun} and {noun} {adverb}.",
    "{last} ({d2}), {noun} {odd}: {noun} {adjective}, {noun} {adjective}.",
    "For {whose} {noun}: {d2} {odd} of {noun}, {n}.{d1} {odd} of {noun}.",
    "{adverb} {adjective}[, says {first} {last}]. Some {noun}, some {noun} or {odd}?",
    "We call it {odd}, they call it {odd} or {odd}, {preposition} {place}.",
    "No {odd} without {odd}; a(n) {adjective} {odd} is a(n) {odd} {joiner} not a(n) {noun}.",
    "List: {noun}/{noun} {d2}, {noun}/{odd} {d2}: {adjective}.",
    "Had he {past} the {noun}, the {noun} would be {adjective}.",
]

VOCABULARY: dict[str, str] = {
    "pronoun": "he; she; it; he; she; someone; nobody; everyone",
    "whose": "his; her; their; its; our; my; your; the other; another; the same; this; that",
    "joiner": "and; but; so; while; because; though; before; after; until; since; or; yet; when",
    "preposition": """under; above; behind; beside; near; against; across; between; without;
inside; outside; towards; beyond; through; around; about; over; among; past; from; with; for;
into; onto""",
    "adverb": """slowly; quickly; badly; nearly; always; never; often; again; hardly; well;
rarely; suddenly; gently; together; almost; perhaps; clearly; loudly; twice; sometimes; already;
daily; carefully; only; really; still; away; early; lately; mostly; usually; online; tonight;
alone""",
    "verb": """walk; answer; ask; offer; order; visit; open; follow; repair; borrow; return;
collect; explain; consider; remember; deliver; cover; clean; count; paint; protect; expect;
present; report; record; complain; discover; obtain; maintain; contain; attend; intend; defend;
extend; gather; wander; wonder; enter; question; mention; position; station; correct; collapse;
address; express; press; pass; miss; guess; discuss; finish; polish; publish; punish; wish;
wash; push; rush; crash; search; watch; touch; reach; match; fetch; stretch; switch; launch;
help; jump; develop; look; book; cook; check; pick; pack; lock; knock; thank; talk; mark; park;
shout; doubt; wait; want; start; support; import; sort; last; list; test; rest; trust; adjust;
assist; resist; treat; repeat; heat; seat; sound; end; fix; need; add; load; fold; yield;
allow; swallow; chew; review; view; play; stay; delay; display; enjoy; employ; destroy; call;
fill; kill; roll; pull; appeal; reveal; boil; fail; sail; train; gain; join; turn; burn; learn;
warn; listen; fasten; weaken; widen; frighten; threaten; sharpen; loosen; harden; reason;
season; climb; dream; claim; warm; perform; inform; transform; confirm; film; affect; reflect;
select; connect; direct; inspect; suggest; request; arrest; invest; consult; insult; lift;
drift; shift; act; contact; attract; react; predict; conduct; instruct; construct; exhibit;
limit; sign; design; assign; clear; fear; pour; honour; flavour; labour; favour; murder;
shelter; filter; alter; register; surrender; render; suffer; trigger""",
    "adjective": """able; terrible; possible; sensible; flexible; comfortable; reasonable;
capable; suitable; available; valuable; miserable; useful; careful; painful; hopeful; grateful;
awful; usual; actual; annual; central; normal; formal; local; vocal; total; final; national;
personal; original; natural; general; several; moral; rural; global; royal; loyal; mental;
digital; ancient; recent; decent; silent; violent; different; present; absent; urgent; current;
distant; constant; important; pleasant; elegant; brilliant; famous; nervous; serious; curious;
obvious; previous; various; dangerous; generous; enormous; delicious; precious; anxious; active;
passive; native; creative; positive; sensitive; expensive; massive; aggressive; effective;
attractive; complete; concrete; separate; private; accurate; desperate; moderate; fortunate;
delicate; adequate; immediate; angry; hungry; thirsty; dusty; tasty; nasty; empty; dirty;
pretty; guilty; healthy; wealthy; filthy; worthy; heavy; happy; sleepy; ugly; lonely; friendly;
lively; silly; chilly; jolly; early; easy; crazy; lazy; fuzzy; noisy; tricky; rocky; lucky;
sticky; spicy; juicy; ready; greedy; muddy; tidy; sandy; windy; cloudy; shady; steady; wooden;
golden; broken; frozen; hidden; sudden; rotten; certain; modern; western; foreign; human; urban;
common; foolish; selfish; stylish; rough; tough; high; fresh; harsh; rich; stiff; deaf; brief;
safe; strange; orange; huge; large; savage; average; simple; humble; double; gentle; little;
subtle; single; mobile; fragile; hostile; fertile; futile; whole; sole; pale; stale; extreme;
supreme; same; lame; fine; divine; genuine; routine; obscene; serene; sincere; severe; mature;
secure; obscure; pure; bare; rare; square; aware; entire; diverse; reverse; intense; tense;
dense; loose; close; precise; wise; false; polite; white; definite; infinite; opposite;
favourite; remote; absolute; brave; naive; alive; domestic; classic; basic; music; public;
tragic; magic; logical; typical; physical; medical; critical; tropical; practical; vertical;
black; thick; quick; sick; weak; dark; pink; blank; frank; drunk; blind; round; profound; blond;
solid; valid; rapid; stupid; vivid; timid; horrid; wicked; naked; crooked; sacred; tired; bored;
mixed; fixed; new; few; narrow; shallow; hollow; yellow; mellow; slow; low; raw; grey; dry; shy;
spare; next; perfect; strict; correct; abstract; exact; swift; soft; adult; difficult; swollen;
short; smart; expert; alert; first; past; vast; honest; modest; just; robust; bright; light;
tight; straight; great; neat; flat; fat; wet; quiet; secret; violet; silver; bitter; clever;
former""",
    "noun": """action; nation; station; position; question; mention; attention; direction;
collection; election; section; fiction; function; option; motion; emotion; portion; fashion;
passion; mission; session; decision; vision; version; division; occasion; religion; region;
union; opinion; onion; million; cushion; reason; season; person; prison; lesson; poison; cotton;
button; lemon; salmon; summer; hammer; dinner; corner; manner; partner; winner; spinner; banner;
paper; supper; pepper; slipper; newspaper; letter; matter; butter; water; winter; quarter;
daughter; sister; master; minister; chapter; character; theatre; centre; metre; number; member;
timber; chamber; rubber; finger; danger; stranger; passenger; manager; anger; ladder; shoulder;
order; border; murder; powder; leader; reader; river; driver; silver; fever; lever; cover;
power; tower; flower; shower; answer; lawyer; layer; player; prayer; employer; officer; dancer;
teacher; feather; weather; leather; mother; father; brother; neighbour; colour; harbour; hour;
doctor; actor; factor; tractor; director; inspector; mirror; error; terror; sector; author;
visitor; monitor; sugar; collar; dollar; cellar; pillar; grammar; war; picture; furniture;
future; nature; feature; creature; culture; temperature; treasure; pleasure; measure; pressure;
figure; failure; injury; century; luxury; library; history; factory; story; memory; battery;
grocery; nursery; mystery; country; industry; pastry; poetry; entry; enquiry; diary; salary;
company; colony; ceremony; money; honey; journey; chimney; kidney; valley; trolley; alley;
family; supply; reply; body; lady; study; remedy; tragedy; comedy; city; party; property;
poverty; liberty; charity; quality; security; university; activity; electricity; ability;
community; variety; society; anxiety; safety; beauty; duty; county; bounty; army; enemy;
academy; economy; energy; allergy; policy; agency; emergency; currency; fancy; mercy; baby;
hobby; lobby; copy; therapy; navy; movie; knowledge; college; village; message; passage;
sausage; damage; image; page; stage; garage; bridge; edge; judge; badge; fridge; change; orange;
challenge; revenge; service; office; police; notice; practice; justice; advice; device; price;
ice; voice; choice; juice; palace; surface; place; face; space; race; peace; piece; niece;
distance; balance; ambulance; instance; insurance; entrance; chance; science; silence; audience;
sentence; difference; conference; influence; evidence; absence; fence; prince; province; horse;
nurse; purse; course; house; mouse; blouse; nose; rose; cause; pause; clause; disease; increase;
exercise; promise; surprise; noise; case; base; phrase; vase; purpose; treatment; apartment;
department; argument; instrument; document; monument; moment; payment; movement; government;
statement; agreement; appointment; accident; student; president; patient; client; agent; parent;
event; tent; giant; servant; restaurant; elephant; merchant; plant; tenant; assistant; point;
paint; joint; aunt; account; amount; mountain; fountain; curtain; captain; bargain; train;
brain; chain; grain; pain; stain; villain; engine; machine; medicine; magazine; routine; line;
wine; mine; spine; telephone; bone; stone; throne; phone; zone; scene; scheme; theme; problem;
system; item; poem; museum; album; medium; premium; stadium; room; bedroom; bathroom; mushroom;
custom; bottom; kingdom; freedom; wisdom; film; farm; arm; alarm; storm; form; platform;
uniform; dream; cream; team; stream; market; blanket; basket; jacket; ticket; pocket; rocket;
bucket; cricket; packet; object; subject; project; insect; effect; aspect; prospect; district;
product; contract; fact; impact; tablet; planet; cabinet; magnet; carpet; trumpet; puppet;
target; budget; gadget; asset; closet; helmet; secret; interest; forest; guest; chest; nest;
west; list; artist; dentist; tourist; scientist; fist; coast; toast; roast; feast; beast;
breast; breakfast; forecast; cast; dust; trust; crust; health; wealth; month; mouth; south;
tooth; truth; youth; cloth; path; bath; death; breath; earth; birth; length; strength; church;
branch; lunch; bench; beach; speech; coach; sandwich; kitchen; chicken; garden; burden; oven;
heaven; queen; pen; screen; brush; dish; fish; flash; bush; thing; building; meeting; feeling;
evening; morning; wedding; painting; clothing; nothing; spring; string; king; ring; wing; song;
tongue; league; vehicle; uncle; circle; bicycle; article; muscle; table; cable; vegetable;
trouble; bottle; battle; cattle; kettle; title; castle; apple; people; couple; temple; example;
angle; jungle; struggle; needle; candle; handle; middle; noodle; puzzle; tunnel; channel; panel;
camel; label; novel; hotel; model; vessel; angel; jewel; fuel; metal; hospital; capital;
festival; arrival; animal; signal; journal; meal; deal; goal; coal; soul; bowl; owl; skull;
hall; wall; ball; bell; shell; hill; bill; pill; mill; skill; doll; roll; symbol; control;
school; tool; pool; knee; coffee; degree; committee; employee; tree; bee; fee; eye; shoe; canoe;
value; issue; tissue; statue; queue; clue; menu; zoo; radio; studio; video; piano; potato;
tomato; photo; hero; zero; echo; idea; area; camera; opera; sofa; drama; panorama; banana;
umbrella; villa; plaza; data; tea; sea; knife; wife; life; leaf; thief; relief; belief; roof;
proof; cliff; staff; stuff; shelf; wolf; golf; week; clock; sock; truck; duck; neck; back;
track; attack; desk; mask; task; risk; disk; bank; tank; link; book; hook; cook; fork; work;
network; clerk; park; shark; milk; silk; walk; chalk; stomach; ankle; elbow; window; shadow;
arrow; sparrow; pillow; rainbow; row; view; crew; screw; jaw; claw; law; straw; box; fox; tax;
wax; index; complex; sex; six; mix; boy; toy; joy; key; monkey; donkey; day; holiday; birthday;
way; highway; railway; bay; tray; display; delay; ship; friendship; trip; tip; lip; group; soup;
cup; map; lamp; stamp; camp; shop; top; rope; soap; shape; tape; type; pipe; recipe; stripe;
sheep; sleep; help; club; pub; crab; web; job; comb; bomb; tomb; bulb; verb; world; field;
child; shield; gold; hand; land; island; sand; band; brand; friend; weekend; legend; wind; mind;
kind; pond; bond; sound; ground; pound; wound; bird; word; record; sword; keyboard; cupboard;
card; yard; board; guard; heart; art; part; report; sport; airport; passport; shirt; skirt;
dirt; desert; concert; expert; head; bread; thread; road; cloud; wood; food; blood; flood; bed;
seed; speed; weed; kid; lid; god; rod; period""",
}
